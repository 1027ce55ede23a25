package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/iptables"
)

// listenInterval is how often listeners are probed before the first rules.
const listenInterval = 250 * time.Millisecond

// families returns both families.
func families() []iptables.Family { return []iptables.Family{iptables.IPv4, iptables.IPv6} }

// wanted returns the families that the configuration does not switch off.
func (c *capture) wanted() []iptables.Family {
	return slices.DeleteFunc(families(), func(f iptables.Family) bool { return c.current().Config.Family(f) == iptables.Off })
}

// listening returns when a listener answers to which the rules redirect, when there is no such
// listener, or when ctx ends.
func (c *capture) listening(ctx context.Context) {
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
	}
	for logged := ""; ctx.Err() == nil; {
		var errs []error
		for _, f := range c.wanted() {
			if c.listens(f) != nil {
				continue
			}
			err := c.answers(ctx, f, "udp")
			if err == nil {
				return
			}
			errs = append(errs, err)
		}
		if len(errs) == 0 {
			return // there is no listener to wait for
		}
		if causes := causes(errs); causes != logged {
			logged = causes
			c.log.Warn("DNS is not captured yet: no listener answers", "error", errors.Join(errs...))
		}
		clock.Sleep(ctx, listenInterval)
	}
}

// causes returns the causes of failed probes as text, without the port of each probe.
func causes(errs []error) string {
	var text strings.Builder
	for _, err := range errs {
		if op := new(net.OpError); errors.As(err, &op) {
			err = op.Err
		}
		text.WriteString(err.Error() + "\n")
	}
	return text.String()
}

// answers returns an error unless a listener of a family answers that the rules redirect to.
func (c *capture) answers(ctx context.Context, f iptables.Family, network string) error {
	if err := c.listens(f); err != nil {
		return err
	}
	at := netip.AddrPortFrom(f.Loopback(), c.current().Config.Port).String()
	return probeOne(ctx, dnsproxy.Addr{Network: network, Address: at})
}

// listens returns an error unless the agent listens, over UDP and TCP, where the rules of a
// family redirect to.
func (c *capture) listens(f iptables.Family) error {
	for _, network := range []string{"udp", "tcp"} {
		if !slices.ContainsFunc(c.proxy.Addrs(), func(l dnsproxy.Addr) bool {
			addr, err := netip.ParseAddrPort(l.Address)
			return err == nil && l.Network == network && iptables.FamilyOf(addr.Addr()) == f && c.current().Config.Serves(addr)
		}) {
			return fmt.Errorf("the agent does not listen where the rules redirect to: want %s port %d over %s, have %v",
				network, c.current().Config.Port, f, c.proxy.Addrs())
		}
	}
	return nil
}
