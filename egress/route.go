package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sort"
	"time"

	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/conntrack"
)

// A route is where a connection leads as far as the VIP and the port alone say it.
type route struct {
	vip   netip.AddrPort
	hosts []vipHost // that have the VIP
}

// A vipHost is a host that has the VIP of a route.
type vipHost struct {
	name    wire.Name   // a wildcard begins with wire.WildcardLabel
	to      destination // of the route's port
	refused error       // if the host does not have the port
}

// route returns the route of a connection, or a refusal. It waits for the first table.
func (s *Server) route(ctx context.Context, conn *net.TCPConn) (route, error) {
	vip, redirected, err := conntrack.OriginalTCP(conn)
	if err != nil {
		return route{}, refuse(ReasonDirect, "%w", err)
	}
	if !redirected {
		return route{}, refuse(ReasonDirect, "the client did not connect to a VIP but to this port itself")
	}
	timer := time.NewTimer(connectTimeout)
	defer timer.Stop()
	select {
	case <-s.config.Synced:
	case <-timer.C:
		return route{}, refuse(ReasonNoHost, "no table has been received yet, so the host of %s is not known", vip.Addr())
	case <-ctx.Done():
		return route{}, refuse(ReasonEnd, "the agent ends")
	}
	return s.routeOf(vip)
}

// routeOf returns the route to a VIP, or a refusal.
func (s *Server) routeOf(vip netip.AddrPort) (route, error) {
	r := route{vip: vip}
	s.config.Table().HostsAt(vip.Addr(), func(h table.Host) {
		to, err := s.destinationOf(&h, vip.Port())
		r.hosts = append(r.hosts, vipHost{h.Name, to, err})
	})
	if len(r.hosts) == 0 {
		return r, refuse(ReasonNoHost, "no host of the table has the address %s", vip.Addr())
	}
	sort.Slice(r.hosts, func(i, j int) bool { return r.hosts[i].name.CompareText(r.hosts[j].name) < 0 })
	// If one of several hosts has the port, the client's name decides.
	if !slices.ContainsFunc(r.hosts, func(h vipHost) bool { return h.refused == nil }) {
		return r, r.hosts[0].refused
	}
	return r, nil
}

// exact returns the only host of the VIP, unless that is a wildcard.
func (r *route) exact() (wire.Name, bool) {
	only := r.hosts[0].name
	return only, len(r.hosts) == 1 && !isWildcard(only)
}

// hostOf returns the host of the VIP that a name belongs to: it is the host, or below it if that is a wildcard.
// Of several wildcards it is the one with the longest suffix, as in DNS. Without any, it returns nil.
func (r *route) hostOf(name wire.Name) *vipHost {
	var found *vipHost
	for i := range r.hosts {
		switch h := &r.hosts[i]; {
		case h.name == name:
			return h
		case isWildcard(h.name) && below(name, h.name) && (found == nil || len(h.name) > len(found.name)):
			found = h
		}
	}
	return found
}

// below reports whether a name is below the suffix of a wildcard.
func below(name, wildcard wire.Name) bool {
	suffix := wildcard[len(wire.WildcardLabel):]
	return len(name) > len(suffix) && name.Below(suffix)
}

func isWildcard(host wire.Name) bool {
	return len(host) > len(wire.WildcardLabel) && host[:len(wire.WildcardLabel)] == wire.WildcardLabel
}

// hostText returns a host as its author wrote it, apart from case: without a dot at the end.
func hostText(name wire.Name) string {
	text := name.String()
	return text[:max(len(text)-1, 0)]
}

// text names the route in errors.
func (r *route) text() string {
	return fmt.Sprintf("%s (%s)", hostText(r.hosts[0].name), r.vip)
}
