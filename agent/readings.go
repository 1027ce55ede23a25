package agent

import (
	"context"
	"net/netip"
	"slices"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/internal/family"
)

// A reading is the part of the status that comes from outside the process: from iptables and
// test queries.
type reading struct {
	silent           []string
	capture          *CaptureStatus
	onlyNameserverOf string
	redirected       []probe.Result
}

// read takes a reading for c. Only root and the user of the agent can ask for one.
func read(ctx context.Context, c *core) reading {
	found := reading{silent: probe.Errors(probe.Listeners(ctx, c.proxy.Addrs()...))}
	if c.capture != nil {
		found.capture = c.capture.status(ctx)
		return found
	}
	listeners := addrPorts(c.proxy)
	found.onlyNameserverOf = OnlyNameserverOf(c.config.DNS.Forward.ResolvConf, listeners)
	if found.onlyNameserverOf == "" {
		found.redirected = probe.Redirections(ctx, slices.DeleteFunc(family.All(), func(f family.Family) bool {
			return !slices.ContainsFunc(listeners, func(at netip.AddrPort) bool { return family.Of(at.Addr()) == f })
		}))
	}
	return found
}
