package test

import (
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// without returns a command of nametap that runs as root, like the container of the rules, with
// these capabilities alone ("+net_raw", or "-all").
func (v *vm) without(capabilities string, args ...string) *exec.Cmd {
	cmd := v.command(args...)
	cmd.SysProcAttr = nil
	cmd.Args = append([]string{
		"setpriv", "--reuid", "0", "--regid", "0", "--clear-groups", "--inh-caps", "-all", "--bounding-set", capabilities, "--no-new-privs", "--",
	}, cmd.Args...)
	cmd.Path = "/usr/bin/setpriv"
	return cmd
}

// TestCaptureWithoutCapability checks that the first line of `capture apply` names the capability
// that the container lacks, whatever the tools print.
func TestCaptureWithoutCapability(t *testing.T) { // K11, I0
	t.Parallel()
	for _, test := range []struct{ backend, has, missing string }{
		{"auto", "-all", "CAP_NET_ADMIN"}, {"nft", "-all", "CAP_NET_ADMIN"}, {"legacy", "-all", "CAP_NET_ADMIN"},
		{"auto", "-all,+net_raw", "CAP_NET_ADMIN"}, {"nft", "-all,+net_raw", "CAP_NET_ADMIN"}, {"legacy", "-all,+net_raw", "CAP_NET_ADMIN"},
		{"legacy", "-all,+net_admin", "CAP_NET_RAW"},
	} {
		t.Run(test.backend+test.has, func(t *testing.T) {
			t.Parallel()
			v := newVM(t, test.backend)
			before := v.Rules()
			for _, wait := range []string{"0s", "1h"} {
				if test.missing != "CAP_NET_ADMIN" && wait != "0s" {
					continue // the command waits for an agent first
				}
				r := v.run(v.without(test.has, v.args("apply", "--capture-wait", wait)...))
				first, _, _ := strings.Cut(r.stderr, "\n")
				if r.code != 1 || !strings.Contains(first, test.missing+" is missing") || !strings.Contains(first, "securityContext.capabilities.add") {
					t.Errorf("--capture-wait %s: %+v", wait, r)
				}
			}
			if after := v.Rules(); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

// TestCaptureSeccomp checks that an error names a seccomp filter if that refuses the tools.
func TestCaptureSeccomp(t *testing.T) { // K11
	t.Parallel()
	vms(t, func(v *vm) {
		t := v.tb
		v.Exec("true")
		cmd := v.command(v.args("apply")...)
		cmd.SysProcAttr = nil
		output := make(chan string)
		go func() {
			runtime.LockOSThread() // the thread ends with this goroutine, because the filter stays
			if err := refuseNetfilter(); err != nil {
				output <- err.Error()
				return
			}
			var text []byte
			v.Run(func() { text, _ = cmd.CombinedOutput() })
			output <- string(text)
		}()
		text := <-output
		if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(text, "this process has the capabilities, but is confined by a seccomp filter") || strings.Contains(text, "is missing:") {
			t.Errorf("%s", text)
		}
	})
}

// refuseNetfilter makes the kernel refuse the calls by which the tools of iptables read rules, for
// the calling thread and its children: a netlink socket for netfilter, and getsockopt.
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
