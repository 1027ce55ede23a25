package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// failed returns the findings of Check about missing things, with their advice.
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
	t.Parallel()
	backends(t, func(l *lab) {
		t := l.t
		c := l.capture()
		before := l.saves()
		if missing := failed(t, c); missing != "" {
			t.Errorf("missing: %s", missing)
		}
		if after := l.saves(); after != before {
			t.Errorf("check changed something:\n%s", after)
		}
	})
}

// Legacy's lock cannot be made.
func TestReadOnlyRun(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		l.mount("/run", unix.MS_RDONLY)
		c := l.apply(func(c *iptables.Config) { c.Backend, c.Only = iptables.Legacy, family.IPv4 })
		if got := l.holders(); got != "iptables-legacy" {
			t.Errorf("rules in %s, want iptables-legacy", got)
		}
		remove(t, c)
	})
}

// K2: if apply is cancelled while a tool hangs, the tool is killed and its changes are
// undone: a family has all rules or none.
func TestHangingTool(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		ipv4 := func(c *iptables.Config) { c.Only = family.IPv4 }
		c := l.apply(ipv4)
		name, hangs := "iptables-"+string(backend)+"-restore", filepath.Join(t.TempDir(), "hangs")
		working := l.tools(map[string]string{name: fmt.Sprintf(`text=$(cat)
case $text in
*"-A NAMETAP"*) echo "$text" | sed /^COMMIT/q | %[1]s "$@"; mkdir %[2]s; exec sleep 100000 ;;
*) echo "$text" | exec %[1]s "$@" ;;
esac`, tool(t, name), hangs)})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		applied := make(chan error, 1)
		go l.ns.Run(func() {
			applied <- applyOther(ctx, c, l.config(ipv4, func(c *iptables.Config) { c.Port = 15054 }))
		})
		wait.Until(t, "the tool hangs", func() bool { return exists(hangs) })
		cancel()
		if err := wait.For(t, "apply ends", applied); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
		if got := l.holders(); got != "" {
			t.Errorf("half of the rules are in %s", got)
		}
		working()
		apply(t, c)
		if got := l.sh("iptables-%s-save", backend); !strings.Contains(got, "--to-ports 15054") || !strings.Contains(got, "--zone-orig 53") {
			t.Errorf("afterwards:\n%s", got)
		}
	})
}

// exists reports whether a file exists.
func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// K9, K10, K12: the agent was killed, so captured queries are refused. Another process removes the rules: DNS works
// while Remove waits for the replies of earlier queries.
func TestFailOpen(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		agent := l.agent()
		l.apply()
		conn := l.socket()
		l.wantOn(conn, "AU")
		agent.stop()
		for _, network := range []string{"udp", "tcp"} {
			if _, err := ask(network, "-", l.server('2'), "2d"); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s: %v, want refused", network, err)
			}
		}
		if _, err := askOn(conn, "2d"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("socket in use: %v, want refused", err)
		}
		remover := l.capture(func(c *iptables.Config) { c.Settle = time.Hour })
		end := l.removing(remover)
		wait.Until(t, "DNS works", func() bool {
			reply, err := ask("udp", "-", l.server('2'), "2d")
			return err == nil && reply == "2dU"
		})
		wait.Until(t, "all is out of use", func() bool { return l.log.Count("no longer captured") == 1 })
		if got := l.holders(); got == "" {
			t.Error("nothing waits for replies")
		}
		end()
		if got := l.holders(); got != "" {
			t.Errorf("after remove: %s", got)
		}
		l.want("U")
		l.wantOn(conn, "U")
	})
}

// removing begins to remove the rules. The function end ends only the wait for replies in flight, and returns when all
// is removed.
func (l *lab) removing(c *iptables.Capture) (end func()) {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	removed := make(chan error, 1)
	go l.ns.Run(func() { removed <- c.Remove(ctx) })
	return func() {
		l.t.Helper()
		cancel()
		if err := wait.For(l.t, "the rules are removed", removed); err != nil {
			l.t.Errorf("remove: %v", err)
		}
	}
}

// K11: a uid that does not exist in the user namespace.
func TestUnmappedUser(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		cmd := self(envApply, "nft")
		first := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1000}}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
			UidMappings: first,
			GidMappings: first,
		}
		out, failed := l.output(cmd)
		if !failed || !strings.Contains(out, "a uid and a gid that /proc/self/uid_map and gid_map have") {
			t.Errorf("%s", out)
		}
	})
}
