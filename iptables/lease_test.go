package iptables_test

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

func leased(c *iptables.Config) { c.Lease, c.FailClosed = true, false }

// renew renews the lease of the lab's family, as the agent.
func (l *lab) renew(c *iptables.Capture) {
	l.t.Helper()
	l.as(1337, func() {
		if err := c.Renew(l.family); err != nil {
			l.t.Errorf("renew: %v", err)
		}
	})
}

// as calls f in the lab; the sockets that it opens are of a user.
func (l *lab) as(uid uintptr, f func()) {
	l.t.Helper()
	l.ns.Run(func() {
		setUser := func(uid uintptr) { _, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uid, 0, 0) } // of this thread alone
		setUser(uid)
		defer setUser(0)
		f()
	})
}

// leased reports whether the lease of the lab's family is alive, as any user sees it.
func (l *lab) leased() (alive bool) {
	l.t.Helper()
	l.as(65534, func() {
		var err error
		if alive, err = iptables.Leased(l.family); err != nil {
			l.t.Errorf("leased: %v", err)
		}
	})
	return alive
}

// V2: rules with a lease capture only while it is renewed, also for a client that keeps its socket, and the
// kernel alone ends the capture. Only the agent can renew it.
func TestLease(t *testing.T) {
	t.Parallel()
	labs(t, all(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(leased)
		if !c.Leased() {
			t.Fatal("the rules have no lease")
		}
		conn := l.socket()
		l.want("U")
		l.wantOn(conn, "U")
		for _, uid := range []uintptr{0, 65534} {
			other := l.capture(leased)
			l.as(uid, func() { _ = other.Renew(l.family) }) // it does nothing
			if l.leased() {
				t.Errorf("user %d has renewed the lease", uid)
			}
		}
		l.want("U")
		for range 2 {
			l.renew(c)
			if !l.leased() {
				t.Error("the lease is not alive after a renewal")
			}
			l.want("AU")
			l.wantOn(conn, "AU")
			renewed := time.Now()
			wait.Until(t, "the kernel ends the capture", func() bool {
				reply, err := ask("udp", "-", l.server('2'), "2d")
				return err == nil && reply == "2dU"
			})
			if took := time.Since(renewed); took < iptables.LeaseTime/2 {
				t.Errorf("the capture ends %v after the renewal, want about %v", took, iptables.LeaseTime)
			}
			if l.leased() {
				t.Error("the lease is alive after its end")
			}
			l.wantOn(conn, "U")
		}
		l.renew(c)
		remove(t, c)
		l.want("U")
		l.wantOn(conn, "U")
	})
}

// V2: rules that another program has saved can be restored when no agent runs, such as at the start of the
// machine. They capture nothing then.
func TestLeaseSaved(t *testing.T) {
	t.Parallel()
	labs(t, all(), func(l *lab) {
		l.agent()
		c := l.apply(leased)
		l.renew(c)
		l.want("AU")
		tool := l.pick("iptables", "ip6tables") + "-" + string(l.backend)
		l.sh("%[1]s -A OUTPUT -p udp --dport 99 -j DROP; %[1]s-save >%[2]s/rules", tool, l.dir)
		remove(l.t, c)
		l.sh("%s-restore <%s/rules", tool, l.dir)
		l.want("U")
		if rules := l.sh("%s -S OUTPUT", tool); !strings.Contains(rules, "--dport 99 -j DROP") {
			l.t.Errorf("the firewall is not restored: %s", rules)
		}
		l.renew(c)
		l.want("AU")
	})
}

// V1: another process renews the lease of rules that an earlier one has installed.
func TestLeaseOfEarlierAgent(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		l.agent()
		l.apply(leased)
		l.renew(l.capture(leased))
		l.want("AU")
	})
}

// K10: a change of nft rules is repaired when the kernel announces it, long before the next check.
func TestRepairAtOnce(t *testing.T) {
	t.Parallel()
	labs(t, []kind{{iptables.NFT, family.IPv4}}, func(l *lab) {
		t := l.t
		l.agent()
		c := l.capture(leased, func(c *iptables.Config) { c.Interval = time.Hour })
		if err := c.Set(iptables.Desired{On: true, Config: l.config(leased, func(c *iptables.Config) { c.Interval = time.Hour })}); err != nil {
			t.Fatal(err)
		}
		l.keep(c)
		<-c.Begun()
		for n := uint64(1); n <= 3; n++ {
			l.renew(c)
			l.want("AU")
			began := time.Now()
			l.sh("nft flush ruleset")
			wait.Until(t, "the rules are repaired", func() bool { return c.Stats().Repairs == n })
			t.Logf("repaired after %v", time.Since(began))
		}
	})
}

// K10: a program that changes nft rules all the time does not make nametap read them all the time.
func TestChangesAllTheTime(t *testing.T) {
	t.Parallel()
	labs(t, []kind{{iptables.NFT, family.IPv4}}, func(l *lab) {
		t := l.t
		l.agent()
		rare := func(c *iptables.Config) { c.Interval = time.Hour }
		c := l.capture(leased, rare)
		if err := c.Set(iptables.Desired{On: true, Config: l.config(leased, rare)}); err != nil {
			t.Fatal(err)
		}
		l.keep(c)
		<-c.Begun()
		l.sh("for n in $(seq 200); do nft add table inet site; nft delete table inet site; done")
		if n := c.Stats().Checks; n == 0 || n > 10 {
			t.Errorf("%d checks, want 1 to 10", n)
		}
	})
}
