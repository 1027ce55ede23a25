package lab

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// An Option changes the machine that [Boot] boots.
type Option func(*Machine)

// Packages installs packages of Debian besides every machine's packages. The first time
// it downloads them; later they come from the cache.
func Packages(names ...string) Option {
	return func(m *Machine) { m.packages = append(m.packages, names...) }
}

// A Machine is a Debian that has booted. Its methods may fail the test, so only the goroutine
// of the test may call them.
type Machine struct {
	// Net is the network namespace of the machine. Sockets that a test opens in it are like sockets of the machine's
	// programs. A reboot replaces it.
	Net   *Place
	World *World

	owner, tb testing.TB // of the machine, and of the subtest that uses it
	packages  []string

	disk    int    // process that keeps the mount namespace with the root directory
	cgroup  string // of all processes of the machine; its last part is the machine's name
	console *testlog.Buffer
	nspawn  *exec.Cmd
	ended   chan error // result of nspawn
	leader  int        // process of the machine's systemd
	setup   string     // commands that make install printed
}

// rootDir is the root directory of a machine in the mount namespace of its disk.
const rootDir = "/mnt/root"

// Boot boots a machine with an empty /etc/default/nametap and its resolv.conf at the
// nameserver [Named]. It returns when systemd has started everything. The machine ends with
// the test.
func Boot(tb testing.TB, options ...Option) *Machine {
	tb.Helper()
	m := &Machine{
		Net: &Place{NS: netns.New(tb), TB: tb}, owner: tb, tb: tb, console: testlog.New(tb),
	}
	for _, option := range options {
		option(m)
	}
	m.World = newWorld(tb, m.Net.NS)
	m.mount(roots(tb, m.packages))
	// Two machines in one cgroup would use the same cgroup for the same unit.
	_, unified, err := hierarchies()
	if err == nil && unified == "" {
		err = errors.New("cgroups of version 2 are missing, run: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
	}
	if err == nil {
		m.cgroup, err = os.MkdirTemp(unified, fmt.Sprintf("%s%d-", cgroupPrefix, os.Getpid())) //nolint:usetesting // a cgroup
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := removeAll([]string{m.cgroup}); err != nil {
			tb.Errorf("ending the machine: %v", err)
		}
	})
	m.Outside("sh", "-euc", `rm -f "$1/etc/resolv.conf" && printf %s "$2" >"$1/etc/resolv.conf"`, "sh",
		rootDir, "search corp.example\nnameserver "+Named+"\n")
	m.start()
	tb.Cleanup(func() {
		m.keepJournal()
		m.kill()
	})
	return m
}

// Sub runs a subtest, in which the methods of the machine fail that one.
func (m *Machine) Sub(t *testing.T, name string, test func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		before := m.tb
		m.tb, m.Net.TB = t, t
		defer func() { m.tb, m.Net.TB = before, before }()
		test(t)
	})
}

// mount makes the disk: an overlay of the directories in a mount namespace of its own, which
// ends with the process that keeps it. That process ends with this one, or with the test.
func (m *Machine) mount(lower []string) {
	m.tb.Helper()
	const script = `mount -t tmpfs nt-lab /mnt
mkdir /mnt/upper /mnt/work ` + rootDir + `
mount -t overlay nt-lab -o "lowerdir=$1,upperdir=/mnt/upper,workdir=/mnt/work" ` + rootDir + `
echo mounted
exec cat`
	cmd := exec.CommandContext(m.tb.Context(), "unshare", "--mount", "--propagation", "private",
		"sh", "-euc", script, "sh", strings.Join(lower, ":"))
	cmd.Cancel = func() error { return nil } // the input ends it
	stdin, err := cmd.StdinPipe()
	if err != nil {
		m.tb.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		m.tb.Fatal(err)
	}
	cmd.Stderr = m.console
	if err := cmd.Start(); err != nil {
		m.tb.Fatal(err)
	}
	m.disk = cmd.Process.Pid
	m.tb.Cleanup(func() {
		_ = stdin.Close()
		_ = cmd.Wait()
	})
	if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		m.tb.Fatalf("mounting the root directory of a machine: %q, %v", line, err)
	}
}

// start boots the machine.
func (m *Machine) start() {
	m.tb.Helper()
	cgroup, err := os.Open(m.cgroup)
	if err != nil {
		m.tb.Fatal(err)
	}
	defer cgroup.Close()
	m.nspawn = exec.Command("nsenter", fmt.Sprintf("--mount=/proc/%d/ns/mnt", m.disk), "--",
		"systemd-nspawn", "--quiet", "--boot", "--directory="+rootDir, "--machine="+filepath.Base(m.cgroup), "--register=no", "--keep-unit",
		"--network-namespace-path="+m.Net.NS.Path(), "--capability=CAP_NET_ADMIN,CAP_NET_RAW",
		"--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe")
	m.nspawn.Stdout, m.nspawn.Stderr = m.console, m.console
	m.nspawn.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	if err := m.nspawn.Start(); err != nil {
		m.tb.Fatal(err)
	}
	m.ended = make(chan error, 1)
	go func(nspawn *exec.Cmd, ended chan<- error) { ended <- nspawn.Wait() }(m.nspawn, m.ended)
	wait.Until(m.tb, "the machine has a first process", func() bool {
		select {
		case err := <-m.ended:
			m.ended <- err
			m.tb.Fatalf("systemd-nspawn ended: %v", err)
		default:
		}
		for _, pid := range process.Children(m.nspawn.Process.Pid) {
			status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && strings.HasSuffix(program, "/systemd") && strings.Contains(string(status), "\t1\n") {
				m.leader = pid
				return true
			}
		}
		return false
	})
	wait.Until(m.tb, "the machine has booted", func() bool {
		state, _ := m.Try("systemctl", "is-system-running", "--wait")
		return strings.Contains(state, "running") || strings.Contains(state, "degraded")
	})
}

// Reboot reboots the machine. It gets a new network namespace, because a kernel that boots
// has no rules. Files that its programs have written to the disk stay.
func (m *Machine) Reboot() {
	m.tb.Helper()
	_, _ = m.Try("systemctl", "reboot") // may be killed by the reboot
	if err := wait.For(m.tb, "the machine shuts down", m.ended); err == nil {
		m.tb.Fatal("the machine powered off")
	}
	m.World.disconnect()
	m.Net = &Place{NS: netns.New(m.owner), TB: m.tb}
	m.World.connect(m.Net.NS)
	m.start()
}

// kill ends the machine as a power failure does.
func (m *Machine) kill() {
	m.tb.Helper()
	if err := syscall.Kill(m.leader, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		m.tb.Errorf("ending the machine: %v", err)
	}
	_ = wait.For(m.tb, "the machine ends", m.ended) // an error, because it was killed
}
