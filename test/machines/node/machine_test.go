package node

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A machine is a set of namespaces, like a machine that has booted and runs nothing yet.
type machine struct {
	t       *testing.T
	net     *netns.NS
	dir     string // configuration and logs, the same path inside and outside
	init    int    // the process ID of its first process
	cgroups cgroups
}

// boot is the script of the machine's first process. Its argument is the work directory.
//
// The root is read-only, so nothing in the machine can change the files of the machine that
// runs the test. kubelet sets some sysctls that are not per namespace; it gets files instead.
// The last command collects the processes whose parents have ended.
const boot = `set -eu
mount --make-rslave /
mount -t proc proc /proc
mount --bind "$1" "$1"
for dir in /run /var/lib /var/log; do mount -t tmpfs -o mode=755 node "$dir"; done
mkdir -p /run/lock /run/sysctl /var/lib/kubelet /var/lib/containerd /var/lib/etcd
mount --bind /proc/sys/net /proc/sys/net
for file in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
	copy=/run/sysctl/$(echo "$file" | tr / _)
	cat "/proc/sys/$file" > "$copy"
	mount --bind "$copy" "/proc/sys/$file"
done
mount -o remount,bind,ro /
mount --make-rshared /
hostname node
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
touch "$1/booted"
exec env --ignore-signal=CHLD sleep infinity
`

// newMachine boots a machine. It ends with the test, or with the process of the test.
func newMachine(t *testing.T) *machine {
	t.Helper()
	dir, err := os.MkdirTemp("", "nt-node-") //nolint:usetesting // TempDir would remove the logs of a failed test
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, net: netns.New(t), dir: dir}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the logs and the configuration of the node are in %s", dir)
			return
		}
		os.RemoveAll(dir)
	})
	m.cgroups = newCgroups(t)
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", boot, "sh", dir)
	m.log(cmd, "boot")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL, // of the thread, which Go keeps until the process ends
	}
	if err := m.net.Start(cmd); err != nil {
		t.Fatalf("booting the node: %v", err)
	}
	m.init = cmd.Process.Pid
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	end := func() error {
		_ = cmd.Process.Kill() // with it, the kernel ends all processes of its namespace
		return m.cgroups.remove()
	}
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		if _, ok := <-interrupted; ok {
			_ = errors.Join(end(), os.RemoveAll(dir)) // a later test removes cgroups that are left
			os.Exit(1)
		}
	}()
	t.Cleanup(func() {
		signal.Stop(interrupted)
		close(interrupted)
		if err := end(); err != nil {
			t.Errorf("ending the node: %v", err)
		}
	})
	wait.Until(t, "the node has booted", func() bool {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("booting the node: %v\n%s", err, m.logOf("boot"))
		default:
		}
		_, err := os.Stat(filepath.Join(dir, "booted"))
		return err == nil
	})
	return m
}

// log sends the output of a command to a log in the work directory.
func (m *machine) log(cmd *exec.Cmd, name string) {
	m.t.Helper()
	file, err := os.OpenFile(filepath.Join(m.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { file.Close() })
	cmd.Stdout, cmd.Stderr = file, file
}

// logOf returns the last lines of a log.
func (m *machine) logOf(name string) string {
	text, err := os.ReadFile(filepath.Join(m.dir, name+".log"))
	if err != nil {
		return err.Error()
	}
	lines := strings.SplitAfter(string(text), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "")
}

// command returns a command that runs in the machine.
func (m *machine) command(ctx context.Context, args ...string) *exec.Cmd {
	enter := []string{"--target", strconv.Itoa(m.init), "--mount", "--net", "--pid", "--uts", "--ipc", "--"}
	return exec.CommandContext(ctx, "nsenter", append(enter, args...)...)
}

// output runs a command in the machine, and returns its standard output.
func (m *machine) output(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 2*wait.Limit)
	defer cancel()
	var stdout, stderr strings.Builder
	cmd := m.command(ctx, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(args, " "), err, &stdout, &stderr)
	}
	return stdout.String()
}

// A service is a program that runs in the machine as long as the test.
type service struct {
	m    *machine
	name string
	args []string
	cmd  *exec.Cmd
	end  chan error
}

// start starts a service. Its log is in the work directory.
func (m *machine) start(name string, args ...string) *service {
	m.t.Helper()
	s := &service{m: m, name: name, args: args}
	s.run()
	return s
}

func (s *service) run() {
	s.m.t.Helper()
	s.cmd = s.m.command(context.WithoutCancel(s.m.t.Context()), s.args...)
	s.m.log(s.cmd, s.name)
	if err := s.cmd.Start(); err != nil {
		s.m.t.Fatalf("starting %s: %v", s.name, err)
	}
	end := make(chan error, 1)
	s.end = end
	go func(cmd *exec.Cmd) { end <- cmd.Wait() }(s.cmd)
}

// restart kills a service and starts it again.
func (s *service) restart(t *testing.T) {
	t.Helper()
	for _, pid := range process.Children(s.cmd.Process.Pid) { // nsenter waits for the service
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatalf("killing %s: %v", s.name, err)
		}
	}
	_ = wait.For(t, s.name+" ends", s.end) // killed
	s.run()
}

// await waits until a service is ready.
func (s *service) await(ready func() error) {
	s.m.t.Helper()
	var err error
	wait.Until(s.m.t, s.name+" is ready", func() bool {
		select {
		case end := <-s.end:
			s.m.t.Fatalf("%s ended: %v\n%s", s.name, end, s.m.logOf(s.name))
		default:
		}
		if err = ready(); err != nil {
			time.Sleep(20 * time.Millisecond) //nolint:forbidigo // a query costs the service time that it needs to start
		}
		return err == nil
	})
}
