package lab

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
)

// A Node is a set of namespaces, like a machine that has booted and runs nothing yet. Its directory is the same inside and
// outside.
type Node struct {
	*Place
	Cgroup string // the name of its cgroup in each hierarchy
}

// bootNode is the script of a node's first process. Its argument is the directory.
//
// The root is read-only, so nothing in the node can change the files of the machine that runs the test. kubelet sets some
// sysctls that are not per namespace; it gets files instead. The last command collects the processes whose parents have
// ended.
const bootNode = `set -eu
mount --make-rslave /
mount -t proc proc /proc
mount --bind "$1" "$1"
for dir in /run /var/lib /var/log; do mount -t tmpfs -o mode=755 node "$dir"; done
mkdir -p /run/lock /run/sysctl /var/lib/kubelet /var/lib/containerd
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

// NewNode boots a node.
func NewNode(tb testing.TB) *Node {
	tb.Helper()
	n := &Node{Place: NewPlace(tb), Cgroup: cgroupPrefix + strconv.Itoa(os.Getpid())}
	all, _, err := hierarchies()
	if err != nil {
		tb.Fatal(err)
	}
	var dirs []string
	for _, hierarchy := range all {
		dir := filepath.Join(hierarchy, n.Cgroup)
		if err := os.Mkdir(dir, 0o755); err != nil {
			tb.Fatalf("making a cgroup for the node: %v", err)
		}
		dirs = append(dirs, dir)
		// By default all pods together get as much of the processors as one process outside.
		for file, share := range map[string]string{"cpu.shares": "16384", "cpu.weight": "1600"} {
			_ = os.WriteFile(filepath.Join(dir, file), []byte(share), 0) // only one hierarchy has one of the files
		}
	}
	tb.Cleanup(func() {
		if err := removeAll(dirs); err != nil {
			tb.Errorf("ending the node: %v", err)
		}
	})
	cmd := exec.CommandContext(context.WithoutCancel(tb.Context()), "sh", "-c", bootNode, "sh", n.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC}
	boot := n.Spawn("boot", cmd)
	boot.Await("the node has booted", func() bool {
		_, err := os.Stat(n.Path("booted"))
		return err == nil
	})
	// With its first process, the kernel ends all processes of the node.
	n.enter = []string{"nsenter", "--target", strconv.Itoa(cmd.Process.Pid), "--mount", "--net", "--pid", "--uts", "--ipc", "--"}
	return n
}
