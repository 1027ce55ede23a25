package agent

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

// controlResolver returns the resolver for the host name of the control plane. If resolv.conf names the
// agent, the resolver queries the agent's nameservers instead: the name may be below the cluster domain, and the agent
// does not answer such names until it has a table (C6). Which addresses are the agent's is known when its listeners are
// open, so the resolver waits until the channel open is closed.
func controlResolver(open <-chan struct{}, nameservers func() []upstream.Spec, listeners func() []netip.AddrPort) *net.Resolver {
	var queries atomic.Uint64 // counts the queries: each query, even a repeated one, goes to the next nameserver
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		select {
		case <-open:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if server, err := netip.ParseAddrPort(address); err == nil {
			plain := slices.DeleteFunc(nameservers(), func(n upstream.Spec) bool { return n.TLS })
			others, _ := resolvconf.WithoutSelf([]netip.AddrPort{server}, listeners(), nil)
			if len(others) == 0 && len(plain) > 0 {
				address = plain[(queries.Add(1)-1)%uint64(len(plain))].Addr.String()
			}
		}
		dialer := net.Dialer{Control: setHops(queryHops)}
		return dialer.DialContext(ctx, network, address)
	}
	return &net.Resolver{PreferGo: true, Dial: dial} // only Go's own resolver calls dial
}
