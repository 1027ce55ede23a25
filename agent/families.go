package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/iptables"
)

const (
	// listenInterval is how often listeners are probed before the first rules.
	listenInterval = 250 * time.Millisecond
	// familyInterval is how often listeners are probed after that.
	familyInterval = time.Second
	// familyMisses is how many times in a row the addresses of a family must be absent
	// before it is left out.
	familyMisses = 3
	// lateLimit is how long the first rules wait for a family whose listeners are open and
	// late. Sockets that systemd held have a backlog of queries, and rules of the previous
	// agent, which leaving the family out would remove.
	lateLimit = 5 * time.Second
)

// families returns both families.
func families() []iptables.Family { return []iptables.Family{iptables.IPv4, iptables.IPv6} }

// wanted returns the families that the configuration does not switch off.
func (c *capture) wanted() []iptables.Family {
	return slices.DeleteFunc(families(), func(f iptables.Family) bool { return c.current().Config.Family(f) == iptables.Off })
}

// listening returns when the listeners of a family answer to which the rules redirect, when
// there is no such listener, or when ctx ends. While the listeners of the other family are only
// late, it waits for them, too, up to lateLimit. It returns the families whose listeners do not
// answer, and why: the port of a listener that could not be opened may be another program's.
// Among them are families that the configuration switches off, because that may change.
func (c *capture) listening(ctx context.Context) (without map[iptables.Family]error) {
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
	}
	patience := time.Now().Add(lateLimit)
	for logged := ""; ; {
		found := probe(ctx, c.proxy.Addrs())
		without = map[iptables.Family]error{}
		for _, f := range families() {
			if err := c.unfit(f, found[f]); err != nil {
				without[f] = err
			}
		}
		wanted := c.wanted()
		answers := slices.ContainsFunc(wanted, func(f iptables.Family) bool { return without[f] == nil })
		open := slices.ContainsFunc(wanted, func(f iptables.Family) bool { return c.listens(f) == nil })
		late := slices.ContainsFunc(wanted, func(f iptables.Family) bool { return isTimeout(without[f]) })
		if ctx.Err() != nil || answers && (!late || time.Now().After(patience)) || !open {
			return without
		}
		if answers {
			continue // the probe has taken probeTimeout
		}
		if err := errors.Join(without[iptables.IPv4], without[iptables.IPv6]); err.Error() != logged {
			logged = err.Error()
			c.log.Warn("DNS is not captured yet: no listener answers", "error", err)
		}
		select {
		case <-time.After(listenInterval):
		case <-ctx.Done():
		}
	}
}

// unfit returns an error if the rules of a family would redirect to no listener of the agent, or
// to one that does not answer.
func (c *capture) unfit(f iptables.Family, found health) error {
	if err := c.listens(f); err != nil || found.answers() {
		return err
	}
	return found.err
}

// listens returns an error unless the agent listens, over UDP and TCP, where the rules of a
// family redirect to.
func (c *capture) listens(f iptables.Family) error {
	for _, network := range []string{"udp", "tcp"} {
		if !slices.ContainsFunc(c.listeners(f), func(l dnsproxy.Addr) bool {
			addr, err := netip.ParseAddrPort(l.Address)
			return err == nil && l.Network == network && c.current().Config.Serves(addr)
		}) {
			return fmt.Errorf("the agent does not listen where the rules redirect to: want %s port %d over %s, have %v",
				network, c.current().Config.Port, f, c.proxy.Addrs())
		}
	}
	return nil
}

// listeners returns the listeners of a family.
func (c *capture) listeners(f iptables.Family) []dnsproxy.Addr {
	return slices.DeleteFunc(c.proxy.Addrs(), func(l dnsproxy.Addr) bool { return family(l) != f })
}

// followListeners leaves a family out while the host does not have its addresses, as long
// as the other one is captured, and captures it again when its listeners answer, until ctx
// ends. A listener that is only late changes nothing.
func (c *capture) followListeners(ctx context.Context) {
	ticker := time.NewTicker(familyInterval)
	defer ticker.Stop()
	misses := map[iptables.Family]int{}
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		for _, f := range c.wanted() {
			if _, out := c.current().without[f]; out {
				if c.unfit(f, probe(ctx, c.listeners(f))[f]) == nil && ctx.Err() == nil {
					c.log.Info("the listeners of a family answer; it is captured", "family", f)
					c.leaveOut(f, nil)
				}
				continue
			}
			err := c.absent(ctx, f)
			misses[f]++
			if err == nil {
				misses[f] = 0
			}
			if misses[f] >= familyMisses {
				c.leaveOut(f, err)
			}
		}
	}
}

// absent returns an error if the host does not have the addresses of a family that may be
// left out.
func (c *capture) absent(ctx context.Context, f iptables.Family) error {
	in := c.current()
	other := func(other iptables.Family) bool { return other != f && in.captures(other) }
	if in.Config.Family(f) == iptables.On || !slices.ContainsFunc(families(), other) {
		return nil
	}
	udp := slices.DeleteFunc(c.listeners(f), func(l dnsproxy.Addr) bool { return l.Network != "udp" })
	found := probe(ctx, udp)[f]
	if found.absent() && ctx.Err() == nil {
		return found.err
	}
	return nil
}

// leaveOut leaves a family out for a reason, or captures it if there is none.
func (c *capture) leaveOut(f iptables.Family, reason error) {
	if reason != nil {
		c.logLeftOut(f, reason)
	}
	c.follow(func(in *inputs) {
		delete(in.without, f)
		if reason != nil {
			in.without[f] = reason
		}
	})
}

// logLeftOut logs that a family is left out.
func (c *capture) logLeftOut(f iptables.Family, reason error) {
	c.log.Warn("DNS over one family is not captured until its listeners answer", "family", f, "error", reason)
}
