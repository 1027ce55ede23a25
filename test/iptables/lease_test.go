package iptables_test

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// captured renews the lease, and checks that queries are captured until the lease ends. If the machine stood still for
// that long, the kernel has rightly ended the capture, so the check is made again. It returns when it has renewed.
func (l *lab) captured(c *iptables.Capture, conns ...net.Conn) (renewed time.Time) {
	l.t.Helper()
	for {
		renewed = time.Now()
		l.renew(c)
		alive, ways := l.leased(), []string(nil)
		for _, network := range []string{"udp", "tcp"} {
			reply, err := ask(network, "-", l.server('2'), "2q")
			ways = append(ways, fmt.Sprint(reply, err))
		}
		for _, conn := range conns {
			reply, err := askOn(conn, "2q")
			ways = append(ways, fmt.Sprint(reply, err))
		}
		if time.Since(renewed) >= iptables.LeaseTime {
			continue
		}
		if want := fmt.Sprint("2qAU", nil); !alive || slices.ContainsFunc(ways, func(way string) bool { return way != want }) {
			l.t.Errorf("the lease is alive is %v, and queries take the ways %q", alive, ways)
		}
		return renewed
	}
}

// V1, V2: rules with a lease capture only while it is renewed, also for a client that keeps its socket, and the
// kernel alone ends the capture. Only the agent can renew it, also of rules that an earlier one has installed.
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
		for _, agent := range []*iptables.Capture{c, l.capture(leased)} {
			renewed := l.captured(agent, conn)
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
	labs(t, diagonal(), func(l *lab) {
		l.agent()
		c := l.apply(leased)
		l.captured(c)
		l.sh("%s -A OUTPUT -p udp --dport 99 -j DROP; %s >%s/rules", l.tool(""), l.tool("-save"), l.dir)
		remove(l.t, c)
		l.sh("%s <%s/rules", l.tool("-restore"), l.dir)
		l.want("U")
		if rules := l.sh("%s -S OUTPUT", l.tool("")); !strings.Contains(rules, "--dport 99 -j DROP") {
			l.t.Errorf("the firewall is not restored: %s", rules)
		}
		l.captured(c)
	})
}

// K10: a change of nft rules is repaired when the kernel announces it, long before the next check.
func TestRepairAtOnce(t *testing.T) {
	t.Parallel()
	alone(t, func(l *lab) {
		rare := func(c *iptables.Config) { c.Backend, c.Interval = iptables.NFT, time.Hour }
		c := l.capture(leased, rare)
		l.set(c, true, l.config(leased, rare))
		l.keep(c)
		<-c.Begun()
		for range 3 {
			repairs := c.Stats().Repairs // table filter may be repaired later than the others
			l.sh("nft flush ruleset")
			wait.Until(l.t, "the rules are repaired", func() bool {
				return c.Stats().Repairs > repairs && strings.Contains(l.sh("iptables-nft-save -t nat"), "-j NAMETAP_OUTPUT")
			})
		}
	})
}
