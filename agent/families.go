package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/iptables"
)

const (
	// familyInterval is how often listeners are asked whether they answer.
	familyInterval = time.Second
	// familyMisses is how many times in a row the addresses of a family must be absent
	// before it is not captured any more.
	familyMisses = 3
)

// listening returns when the listeners answer to which rules would lead, or ctx ends:
// before that, rules would take DNS away. IPv6 is captured if it answers by then;
// otherwise followFamilies captures it when it does.
func (c *capture) listening(ctx context.Context) {
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
	}
	for ctx.Err() == nil {
		found := probe(ctx, c.proxy.Addrs())
		v4 := found[iptables.IPv4]
		if v4.answers() || c.listens("127.0.0.1", "0.0.0.0") != nil {
			c.fit(ctx, found[iptables.IPv6])
			return
		}
		c.log.Warn("DNS is not captured yet: a listener does not answer", "error", v4.err)
		select {
		case <-time.After(switchInterval):
		case <-ctx.Done():
		}
	}
}

// fit compares where the rules lead to with where we listen: one listener that could not
// be opened does not end the agent, but its port may be another program's. IPv6 is left
// out while its listeners are missing or do not answer, unless it is asked for.
func (c *capture) fit(ctx context.Context, v6 health) {
	if c.unfit = c.listens("127.0.0.1", "0.0.0.0"); c.unfit != nil || c.config.Rules.IPv6 == iptables.Off {
		return
	}
	err := c.listens("::1", "::")
	if err == nil {
		err = v6.err
	}
	switch {
	case err == nil || ctx.Err() != nil:
	case c.config.Rules.IPv6 == iptables.On:
		c.unfit = err
	default:
		c.log.Warn("DNS over one family is not captured until its listeners answer", "family", iptables.IPv6, "error", err)
		c.unfit = c.leaveOutIPv6(ctx, true)
	}
}

// leaveOutIPv6 has IPv6 not captured, or captured as configured.
func (c *capture) leaveOutIPv6(ctx context.Context, out bool) error {
	return c.reconfigure(ctx, func() { c.withoutIPv6 = out })
}

// reconfigure changes what the rules depend on, and exchanges them.
func (c *capture) reconfigure(ctx context.Context, change func()) error {
	c.changing.Lock()
	defer c.changing.Unlock()
	change()
	rules := c.config.Rules
	if c.withoutIPv6 {
		rules.IPv6 = iptables.Off
	}
	return c.rules.Reconfigure(ctx, rules)
}

// followFamilies has IPv6 captured when its listeners answer, and not when the host does
// not have its addresses any more, until ctx ends. A listener that is only late changes
// nothing.
func (c *capture) followFamilies(ctx context.Context) {
	if c.config.Rules.IPv6 != iptables.IfAvailable {
		return
	}
	ticker := time.NewTicker(familyInterval)
	defer ticker.Stop()
	misses := 0
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		var listeners []dnsproxy.Addr
		for _, l := range c.proxy.Addrs() {
			if family(l) == iptables.IPv6 {
				listeners = append(listeners, l)
			}
		}
		v6 := probe(ctx, listeners)[iptables.IPv6]
		misses++
		if !v6.absent() {
			misses = 0
		}
		out := c.withoutIPv6 // written by this goroutine alone
		switch {
		case ctx.Err() != nil:
			return
		case out && v6.answers() && c.listens("::1", "::") == nil:
			c.log.Info("the listeners of a family answer: it is captured", "family", iptables.IPv6)
		case !out && misses >= familyMisses:
			c.log.Warn("DNS over one family is not captured until its listeners answer", "family", iptables.IPv6, "error", v6.err)
		default:
			continue
		}
		if err := c.leaveOutIPv6(ctx, !out); err != nil && ctx.Err() == nil {
			c.log.Error("the capture rules cannot be exchanged; they are tried again", "error", err)
		}
	}
}

// listens returns an error unless we listen on loopback, over UDP and TCP.
func (c *capture) listens(loopback, all string) error {
	port := strconv.Itoa(int(c.config.Rules.Port))
	var errs []error
	for _, network := range []string{"udp", "tcp"} {
		want := dnsproxy.Addr{Network: network, Address: net.JoinHostPort(loopback, port)}
		everywhere := dnsproxy.Addr{Network: network, Address: net.JoinHostPort(all, port)}
		if len(c.config.Rules.VirtualInterfaces) > 0 {
			want = everywhere // their queries come to the interfaces' addresses
		}
		if addrs := c.proxy.Addrs(); !slices.Contains(addrs, want) && !slices.Contains(addrs, everywhere) {
			errs = append(errs, fmt.Errorf("the agent does not listen where the rules would lead: want %s, have %v", want, addrs))
		}
	}
	return errors.Join(errs...)
}
