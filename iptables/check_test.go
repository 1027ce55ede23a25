package iptables_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/iptables"
)

// failed returns what Check says is missing, with the advice.
func failed(t *testing.T, c *iptables.Capture) string {
	t.Helper()
	var b strings.Builder
	for _, f := range c.Check(t.Context()) {
		if !f.OK {
			b.WriteString(f.What + ": " + f.Detail + ": " + f.Advice + "\n")
			if f.Advice == "" {
				t.Errorf("%s: no advice", f.What)
			}
		}
	}
	return b.String()
}

// K11
func TestCheck(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		c := newCapture(t, cfg, new(logBuffer))
		before := saves(t)
		if missing := failed(t, c); missing != "" {
			t.Errorf("missing: %s", missing)
		}
		if after := saves(t); after != before {
			t.Errorf("check changed something:\n%s", after)
		}
	})
}

// K11: without the capabilities, everything says so.
func TestCapabilities(t *testing.T) {
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		cfg := iptables.DefaultConfig()
		cfg.Backend = backend
		c := newCapture(t, cfg, new(logBuffer))
		dropCapabilities(t)
		if missing := failed(t, c); !strings.Contains(missing, "CAP_NET_ADMIN: this process does not have it") {
			t.Errorf("missing: %s", missing)
		}
		err := c.Apply(t.Context())
		if err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
			t.Errorf("apply: %v", err)
		}
	})
}

// dropCapabilities takes all capabilities from this process and its children.
func dropCapabilities(t *testing.T) {
	t.Helper()
	for bit := range 64 {
		if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(bit), 0); errno != 0 {
			break
		}
	}
	if err := syscall.Setgid(4000); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setuid(4000); err != nil {
		t.Fatal(err)
	}
}

// K11: the tools are not installed.
func TestNoTools(t *testing.T) {
	if !isolated(t) {
		return
	}
	if err := unix.Mount("tmpfs", "/usr/sbin", "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("iptables-save"); err == nil {
		t.Skip("LEFT OUT: iptables is not in /usr/sbin here")
	}
	c := newCapture(t, iptables.DefaultConfig(), new(logBuffer))
	for what, err := range map[string]error{"apply": c.Apply(t.Context()), "remove": c.Remove(t.Context())} {
		if err == nil || !strings.Contains(err.Error(), "install the package iptables") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if missing := failed(t, c); !strings.Contains(missing, "install the package iptables") {
		t.Errorf("missing: %s", missing)
	}
}

// Another program holds legacy's lock.
func TestLockHeld(t *testing.T) {
	if !isolated(t) {
		return
	}
	lock, err := os.Create("/run/xtables.lock")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	cfg := iptables.DefaultConfig()
	cfg.Backend = iptables.Legacy
	cfg.IPv6 = iptables.Off
	c := newCapture(t, cfg, new(logBuffer))
	start := time.Now()
	err = c.Apply(t.Context())
	if err == nil || !strings.Contains(err.Error(), "another program holds /run/xtables.lock") {
		t.Errorf("%v", err)
	}
	if took := time.Since(start); took < 4*time.Second || took > 14*time.Second {
		t.Errorf("gave up after %v, want about 5 s", took)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	apply(t, c)
}

// Legacy's lock cannot be made.
func TestReadOnlyRun(t *testing.T) {
	if !isolated(t) {
		return
	}
	if err := unix.Mount("", "/run", "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	cfg := iptables.DefaultConfig()
	cfg.Backend = iptables.Legacy
	c := newCapture(t, cfg, new(logBuffer))
	apply(t, c)
	if got := holders(t); got != inLegacy {
		t.Errorf("rules in %s, want %s", got, inLegacy)
	}
	remove(t, c)
}

// A uid that does not exist in the user namespace.
func TestUnmappedUser(t *testing.T) {
	if !isolated(t) {
		return
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), envApply+"=nft")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1000}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1000}},
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) {
		t.Skipf("LEFT OUT: needs user namespaces: %v", err)
	}
	if err == nil || !strings.Contains(string(out), "uid 1337 is not mapped in this user namespace") {
		t.Errorf("%v: %s", err, out)
	}
}

// A tool that hangs is given up, and so is one that is not wanted any more.
func TestHangingTool(t *testing.T) {
	if !isolated(t) {
		return
	}
	tools(t, nil, map[string]string{"iptables-nft-restore": "exec sleep 60"})
	cfg := iptables.DefaultConfig()
	cfg.Backend = iptables.NFT
	c := newCapture(t, cfg, new(logBuffer))
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	start := time.Now()
	if err := c.Apply(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("gave up after %v", took)
	}
}

// K9, K10: the agent has been killed, and somebody else removes.
func TestFailOpen(t *testing.T) {
	matrix(t, func(l *lab) {
		t := l.t
		agent := l.agent()
		l.capture()
		conn := l.socket()
		l.wantOn(conn, "AU")
		agent.stop()
		if _, err := ask("udp", "-", l.server('2'), "2d"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%v, want refused", err)
		}
		start := time.Now()
		remove(t, newCapture(t, l.config(), l.log))
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("remove took %v", took)
		}
		l.want("U")
		l.wantOn(conn, "U")
	})
}
