package iptables_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

func leased(c *iptables.Config) { c.Lease, c.FailClosed = true, false }

// renew renews the lease of the lab's family.
func (l *lab) renew(c *iptables.Capture) {
	l.t.Helper()
	l.ns.Run(func() {
		if err := c.Renew(l.family); err != nil {
			l.t.Errorf("renew: %v", err)
		}
	})
}

// V2: rules with a lease capture only while it is renewed, also for a client that keeps its socket, and the
// kernel alone ends the capture. The removal leaves no set.
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
		for range 2 {
			l.renew(c)
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
			l.wantOn(conn, "U")
		}
		l.renew(c)
		remove(t, c)
		l.want("U")
		l.wantOn(conn, "U")
		if sets := l.sh("ipset list -n"); strings.TrimSpace(sets) != "" {
			t.Errorf("sets after the removal: %s", sets)
		}
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
	labs(t, []kind{{iptables.NFT, iptables.IPv4}}, func(l *lab) {
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
