package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/netns"
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

// K11, K17: without IPv6 in the kernel, IPv4 can be captured. A failure that is not a lack is not
// tried with all variants.
func TestCheckOneFamily(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, runs := l.t, filepath.Join(l.t.TempDir(), "runs")
		name := "ip6tables-" + string(l.backend) + "-restore"
		for _, test := range []struct {
			message string
			runs    int
		}{{"Table does not exist (do you need to insmod?)", 16}, {"Permission denied", 1}} {
			l.tools(map[string]string{name: fmt.Sprintf("echo run >> %s\necho '%s' >&2\nexit 3", runs, test.message)})
			c := l.capture()
			var got []iptables.Finding
			for _, f := range c.Check(t.Context()) {
				if !f.OK && strings.Contains(f.What, "rules for") {
					got = append(got, f)
				}
			}
			if len(got) != 1 || got[0].Needed || !strings.Contains(got[0].Detail, test.message) {
				t.Errorf("%s: %+v", test.message, got)
			}
			text, err := os.ReadFile(runs)
			if n := strings.Count(string(text), "run"); err != nil || n != test.runs {
				t.Errorf("%s: the tool ran %d times, want %d, %v", test.message, n, test.runs, err)
			}
			if err := os.Remove(runs); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// K11: without the capabilities, every command reports it.
func TestCapabilities(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		cmd := self(envApply, string(l.backend))
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4000, Gid: 4000}}
		out, failed := l.output(cmd)
		for _, want := range []string{
			"^apply: CAP_NET_ADMIN is missing: .*securityContext.capabilities.add.*runAsUser: 0.*AmbientCapabilities",
			"check: {What:CAP_NET_ADMIN OK:false Needed:true Detail:this process does not have it Advice:add it",
			"check: {What:CAP_NET_RAW OK:false Needed:" + strconv.FormatBool(l.backend == iptables.Legacy),
			"check: {What:backend OK:false",
		} {
			if !failed || !regexp.MustCompile(want).MatchString(out) {
				l.t.Errorf("want %s:\n%s", want, out)
			}
		}
	})
}

// K11: the tools are not installed.
func TestNoTools(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		l.mount("/usr/sbin", 0)
		if _, err := exec.LookPath("iptables-save"); err == nil {
			t.Skip("LEFT OUT: iptables is not in /usr/sbin here")
		}
		c := l.capture()
		if err := c.Apply(t.Context()); err == nil || !strings.Contains(err.Error(), "install the package iptables") {
			t.Errorf("apply: %v", err)
		}
		remove(t, c) // the kernel reports no rules
		if missing := failed(t, c); !strings.Contains(missing, "install the package iptables") {
			t.Errorf("missing: %s", missing)
		}
	})
}

func legacyIPv4(c *iptables.Config) { c.Backend, c.Only = iptables.Legacy, family.IPv4 }

// Another program holds legacy's lock.
func TestLockHeld(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		l.mount("/run", 0)
		lock := hold(t)
		c := l.capture(legacyIPv4, quick)
		start := time.Now()
		err := c.Apply(t.Context())
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

		// Rules that could not be replaced are the previous ones, and Keep replaces them.
		lock = hold(t)
		other := l.config(legacyIPv4, quick, func(c *iptables.Config) { c.ExcludeUIDs = append(c.ExcludeUIDs, 5353) })
		if err := applyOther(t.Context(), c, other); err == nil {
			t.Error("replaced while another program holds the lock")
		}
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
		if got := state(t, c); got != iptables.Drifted {
			t.Errorf("%s, want %s", got, iptables.Drifted)
		}
		l.keep(c)
		wait.Until(t, "the rules are replaced", func() bool { return state(t, c) == iptables.InPlace })
		if saves := l.saves(); !strings.Contains(saves, "--uid-owner 5353") {
			t.Error(saves)
		}
	})
}

// hold takes the lock of iptables-legacy.
func hold(t *testing.T) *os.File {
	t.Helper()
	lock, err := os.Create("/run/xtables.lock")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return lock
}

// state returns the state of IPv4's rules.
func state(t *testing.T, c *iptables.Capture) iptables.State {
	t.Helper()
	status, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return status.Families[0].State
}

// Legacy's lock cannot be made.
func TestReadOnlyRun(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		l.mount("/run", unix.MS_RDONLY)
		c := l.apply(legacyIPv4)
		if got := l.holders(); got != "iptables-legacy" {
			t.Errorf("rules in %s, want iptables-legacy", got)
		}
		remove(t, c)
	})
}

// A uid that does not exist in the user namespace.
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
		if !failed || !strings.Contains(out, "uid 1337 is not mapped in this user namespace") {
			t.Errorf("%s", out)
		}
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
		name := "iptables-" + string(backend) + "-restore"
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		working := l.tools(map[string]string{name: fmt.Sprintf(`text=$(cat)
case $text in
*"-A NAMETAP"*) echo "$text" | sed /^COMMIT/q | %[1]s "$@"; exec sleep 60 ;;
*) echo "$text" | exec %[1]s "$@" ;;
esac`, path)})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		other := l.config(ipv4, func(c *iptables.Config) { c.Port, c.Zone = 15054, 54 })
		if err := applyOther(ctx, c, other); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		if took := time.Since(start); took > 8*time.Second {
			t.Errorf("gave up after %v", took)
		}
		if got := l.holders(); got != "" {
			t.Errorf("half of the rules are in %s", got)
		}
		working()
		apply(t, c)
		if got := l.sh("iptables-%s-save", backend); !strings.Contains(got, "--to-ports 15054") || !strings.Contains(got, "--zone-orig 54") {
			t.Errorf("afterwards:\n%s", got)
		}
	})
}

// K11: nft works without CAP_NET_RAW, legacy does not.
func TestWithoutNetRaw(t *testing.T) {
	t.Parallel()
	netns.Need(t, "setpriv")
	backends(t, func(l *lab) {
		cmd := self(envApply, string(l.backend))
		var err error
		if cmd.Path, err = exec.LookPath("setpriv"); err != nil {
			l.t.Fatal(err)
		}
		cmd.Args = []string{"setpriv", "--bounding-set", "-net_raw", "--inh-caps", "-net_raw", os.Args[0]}
		out, failed := l.output(cmd)
		if failed != (l.backend == iptables.Legacy) || failed && !strings.Contains(out, "{What:CAP_NET_RAW OK:false Needed:true") {
			l.t.Errorf("failed %v: %s", failed, out)
		}
	})
}

// K9, K10: the agent was killed, and another process removes the rules. DNS works before
// Remove has waited for the replies of earlier queries.
func TestFailOpen(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		agent := l.agent()
		l.apply()
		conn := l.socket()
		l.wantOn(conn, "AU")
		agent.stop()
		if _, err := ask("udp", "-", l.server('2'), "2d"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%v, want refused", err)
		}
		start := time.Now()
		l.saves() // two thirds of what the removal runs; it tells how busy the machine is
		limit := max(2*time.Second, 4*time.Since(start))
		ctx, cancel := context.WithCancel(t.Context())
		remover := l.capture(func(c *iptables.Config) { c.Settle = time.Minute })
		var removing sync.WaitGroup
		start = time.Now()
		removing.Go(func() {
			l.ns.Run(func() {
				if err := remover.Remove(ctx); err != nil {
					t.Errorf("remove: %v", err)
				}
			})
		})
		wait.Until(t, "DNS works", func() bool {
			reply, err := ask("udp", "-", l.server('2'), "2d")
			return err == nil && reply == "2dU"
		})
		took := time.Since(start)
		t.Logf("DNS works after %v", took)
		if took > limit {
			t.Errorf("DNS works after %v, want %v", took, limit)
		}
		wait.Until(t, "all is out of use", func() bool { return l.log.Count("no longer captured") == 1 })
		cancel() // which only ends the wait
		removing.Wait()
		if got := l.holders(); got != "" {
			t.Errorf("after remove: %s", got)
		}
		l.want("U")
		l.wantOn(conn, "U")
	})
}
