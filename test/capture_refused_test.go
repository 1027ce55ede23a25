package test

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestCaptureSeccomp checks that an error names a seccomp filter if that refuses the tools.
func TestCaptureSeccomp(t *testing.T) { // K11
	t.Parallel()
	v := newVM(t, "nft")
	v.Exec("true")
	cmd := v.command(v.args("apply")...)
	cmd.SysProcAttr = nil
	// A thread of this process cannot set the filter: it would have to end, and the kernel kills
	// the agents that it started for other tests.
	cmd.Path, cmd.Args = "/proc/self/exe", append([]string{"confined"}, cmd.Args...)
	cmd.Env = append(cmd.Env, confinedEnv+"=1")
	var text []byte
	v.Run(func() { text, _ = cmd.CombinedOutput() })
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(text), "this process has the capabilities, but is confined by a seccomp filter") || strings.Contains(string(text), "is missing:") {
		t.Errorf("%s", text)
	}
}

// TestCaptureUnmapped checks that an error names a uid of the agent that does not exist in the user namespace.
func TestCaptureUnmapped(t *testing.T) { // K11
	t.Parallel()
	v := newVM(t, "nft")
	cmd := v.command(v.args("apply")...)
	few := []syscall.SysProcIDMap{{Size: 1000}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UidMappings: few, GidMappings: few}
	if r := v.run(cmd); r.code != 1 || !strings.Contains(r.stderr, "uid 1337 is not mapped in this user namespace") {
		t.Errorf("%+v", r)
	}
}

// confinedEnv makes the test binary run a command that the filter of refuseNetfilter confines.
const confinedEnv = "NAMETAP_TEST_CONFINED"

// runConfined replaces this process by a confined command. It returns only if that fails.
func runConfined(command []string) int {
	runtime.LockOSThread() // the filter is of one thread
	err := errors.Join(os.Unsetenv(confinedEnv), refuseNetfilter())
	if err == nil {
		err = unix.Exec(command[0], command, os.Environ())
	}
	fmt.Fprintln(os.Stderr, err)
	return 2
}

// refuseNetfilter makes the kernel refuse the calls by which the tools of iptables read rules, for
// the calling thread and what it executes: a netlink socket for netfilter, and getsockopt.
func refuseNetfilter() error {
	const (
		number, family, protocol = 0, 16, 32 // offsets in struct seccomp_data
		refuse                   = unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	)
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	equals := func(value uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: value, Jt: yes, Jf: no}
	}
	result := func(value uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value} }
	filter := []unix.SockFilter{
		load(number), equals(unix.SYS_GETSOCKOPT, 5, 0), equals(unix.SYS_SOCKET, 0, 5),
		load(family), equals(unix.AF_NETLINK, 0, 3),
		load(protocol), equals(unix.NETLINK_NETFILTER, 0, 1),
		result(refuse), result(unix.SECCOMP_RET_ALLOW),
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0)
}
