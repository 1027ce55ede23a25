package dnsproxy

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A routing says whom to ask for a name, by resolv.conf and the settings. It never
// changes; when resolv.conf does, there is a new one.
type routing struct {
	conf     *resolvconf.Config
	search   []wire.Name // of conf, without the root
	asIs     int         // how many domains of search stand before the root, which changes no name
	routes   []route     // the longest suffix first
	fallback *upstream.Group
	servers  []upstream.Spec // of fallback
	local    []netip.Addr    // addresses of this host
}

// A route is a [Route] in use.
type route struct {
	suffix  wire.Name
	group   *upstream.Group
	servers []upstream.Spec // of group
}

// group returns the nameservers to ask for a name.
func (r *routing) group(name wire.Name) *upstream.Group {
	for i := range r.routes {
		if name.Below(r.routes[i].suffix) {
			return r.routes[i].group
		}
	}
	return r.fallback
}

// query returns the query for a question in wire form, with an OPT record of our own:
// what clients say in theirs is for us (RFC 6891, section 6.2.1).
func (r *routing) query(key cache.Key) []byte {
	packet := make([]byte, wire.HeaderLen, wire.HeaderLen+len(key.Name)+1+4+wire.OPTLen)
	packet[wire.FlagsOffset] = wire.RD
	if r.conf.TrustAD {
		packet[wire.FlagsOffset+1] |= wire.AD // the answer's AD is wanted: RFC 6840, section 5.7
	}
	var ttl uint32
	if key.DO {
		ttl = wire.OPTDO
	}
	if key.CD {
		packet[wire.FlagsOffset+1] |= wire.CD
	}
	packet[wire.QDCountOffset+1], packet[wire.ARCountOffset+1] = 1, 1
	packet = append(append(packet, key.Name...), 0)
	packet = binary.BigEndian.AppendUint16(packet, key.Type)
	packet = binary.BigEndian.AppendUint16(packet, key.Class)
	return wire.AppendOPT(packet, DefaultEDNSUDPSize, ttl)
}

// standsFor reports whether resolv.conf's nameservers are asked instead of the one that
// a captured query was on its way to: because it is one of them.
//
// If resolv.conf names a forwarder on this host, then a query for another of its
// nameservers comes from that forwarder, or from a client that has given it up. In both
// cases it is meant for that nameserver, and the forwarder would send it back to us.
func (r *routing) standsFor(server netip.AddrPort) bool {
	if r.conf.Uplink != "" && server.Addr().IsLoopback() {
		return true // systemd-resolved's stub, in whose place others are asked
	}
	if a := server.Addr(); a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
		return true // the kernel does not say on which interface it was to be asked
	}
	onHost := func(server netip.AddrPort) bool {
		return server.Addr().IsLoopback() || slices.Contains(r.local, server.Addr())
	}
	return slices.Contains(r.conf.Servers, server) && (onHost(server) || !slices.ContainsFunc(r.conf.Servers, onHost))
}

// A suffixRoute is a [Route] as the configuration has it, its suffix in wire form.
type suffixRoute struct {
	suffix  wire.Name
	servers []upstream.Spec
}

// parseRoutes reads routes, the longest suffix first.
func parseRoutes(configured []Route) ([]suffixRoute, error) {
	var routes []suffixRoute
	for _, r := range configured {
		suffix, err := wire.ParseHostname(r.Suffix)
		if err != nil {
			return nil, fmt.Errorf("upstream for %q: want a domain name: %w", r.Suffix, err)
		}
		routes = append(routes, suffixRoute{suffix: suffix, servers: r.Servers})
	}
	slices.SortStableFunc(routes, func(x, y suffixRoute) int { return len(y.suffix) - len(x.suffix) })
	return routes, nil
}

// routeSuffixes returns the suffixes of routes.
func routeSuffixes(routes []suffixRoute) []wire.Name {
	var suffixes []wire.Name
	for _, r := range routes {
		suffixes = append(suffixes, r.suffix)
	}
	return suffixes
}

func (s *Server) files() resolvconf.Files { return resolvconf.Files{Path: s.config.ResolvConf} }

// readResolvConf makes the first routing.
func (s *Server) readResolvConf() {
	conf, err := s.files().Read()
	if err != nil {
		s.log.Warn("resolv.conf cannot be used: no search list, and no nameservers but those set",
			"path", s.config.ResolvConf, "error", err)
		conf = resolvconf.Parse(nil)
	}
	s.logIgnored(conf)
	s.useResolvConf(conf)
}

// watchResolvConf makes the routing again, now that listeners are open whose addresses
// no nameserver may have, and returns the watcher of resolv.conf.
func (s *Server) watchResolvConf() *resolvconf.Watcher {
	conf := s.handler.forwarder.routing.Load().conf
	s.useResolvConf(conf)
	return &resolvconf.Watcher{
		Files: s.files(), Current: conf,
		Changed: func(conf *resolvconf.Config) {
			s.log.Info("resolv.conf has changed", "path", s.config.ResolvConf,
				"nameservers", conf.Servers, "search", conf.Search)
			s.logIgnored(conf)
			s.useResolvConf(conf)
		},
		Failed: func(err error) {
			s.handler.metrics.resolvConfErrors.Inc()
			s.log.Warn("resolv.conf cannot be used any more: what it said before stays in use",
				"path", s.config.ResolvConf, "error", err)
		},
	}
}

// logIgnored tells what of a resolv.conf is left out.
func (s *Server) logIgnored(conf *resolvconf.Config) {
	ignored := slices.Clone(conf.Ignored)
	for _, domain := range conf.Search {
		if _, err := wire.ParseHostname(domain); err != nil && domain != "." {
			ignored = append(ignored, fmt.Sprintf("search %q: want a domain name: %v", domain, err))
		}
	}
	for _, value := range ignored {
		s.log.Warn("resolv.conf: a value is left out", "path", s.config.ResolvConf, "value", value)
	}
}

// useResolvConf makes the routing of a resolv.conf and puts it to use. If that changes
// what answers there are, those from before are forgotten, and those on their way are not
// kept.
func (s *Server) useResolvConf(conf *resolvconf.Config) {
	local, err := localAddrs()
	s.routingChange.Lock()
	defer s.routingChange.Unlock()
	if err != nil {
		s.log.Warn("the addresses of this host cannot be read now and are read again", "error", err)
		if before := s.handler.forwarder.routing.Load(); before != nil {
			local = before.local
		}
	}
	s.useLocked(conf, local)
}

// addressInterval is how often the addresses of this host are read. Reading them costs
// less than 0.1 ms.
const addressInterval = 2 * time.Second

// followAddresses makes the routing again when this host has other addresses, until ctx
// ends: a nameserver's address may become one of them.
func (s *Server) followAddresses(ctx context.Context) {
	ticker := time.NewTicker(addressInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		local, err := localAddrs()
		if err != nil {
			continue // and read again
		}
		s.routingChange.Lock()
		if now := s.handler.forwarder.routing.Load(); !slices.Equal(local, now.local) {
			s.useLocked(now.conf, local)
		}
		s.routingChange.Unlock()
	}
}

// useLocked is useResolvConf with the addresses of this host; routingChange is held.
func (s *Server) useLocked(conf *resolvconf.Config, local []netip.Addr) {
	r := &routing{conf: conf, servers: s.config.Upstreams, local: local}
	r.readSearch()
	if len(r.servers) == 0 {
		for _, addr := range conf.Servers {
			r.servers = append(r.servers, upstream.Spec{Addr: addr})
		}
	}
	r.servers = s.withoutSelf(r.servers, local)
	f := s.handler.forwarder
	options := upstream.Options{
		Rotate: conf.Rotate, UseVC: conf.UseVC, Parallel: s.config.Parallel,
		Fastest: s.config.Order == OrderFastest,
		Timeout: conf.Timeout, Attempts: conf.Attempts,
	}
	r.fallback = f.client.Group(r.servers, options)
	for _, sr := range s.routes {
		servers := s.withoutSelf(sr.servers, local)
		r.routes = append(r.routes, route{suffix: sr.suffix, group: f.client.Group(servers, options), servers: servers})
	}
	before := f.routing.Swap(r)
	f.walks.Add(1)
	if before != nil && !before.answersLike(r) {
		f.flush(nil)
	}
}

// readSearch sets what is needed of the search list of resolv.conf.
func (r *routing) readSearch() {
	r.asIs = math.MaxInt
	for _, domain := range r.conf.Search {
		if domain == "." {
			r.asIs = min(r.asIs, len(r.search))
		} else if name, err := wire.ParseHostname(domain); err == nil {
			r.search = append(r.search, name)
		}
	}
}

// answersLike reports whether nameservers answer the same by both routings.
func (r *routing) answersLike(other *routing) bool {
	sameServers := func(x, y route) bool { return slices.Equal(x.servers, y.servers) }
	return slices.Equal(r.servers, other.servers) && slices.EqualFunc(r.routes, other.routes, sameServers) &&
		r.conf.TrustAD == other.conf.TrustAD
}

// withoutSelf returns the nameservers that are not this agent itself (F6).
func (s *Server) withoutSelf(specs []upstream.Spec, local []netip.Addr) []upstream.Spec {
	var listeners []netip.AddrPort
	s.mu.Lock()
	open := slices.Clone(s.listeners)
	s.mu.Unlock()
	for _, l := range open {
		if addr, err := netip.ParseAddrPort(l.addr().Address); err == nil { // always, of a listener
			listeners = append(listeners, addr)
		}
	}
	var others []upstream.Spec
	for _, spec := range specs {
		_, self := resolvconf.WithoutSelf([]netip.AddrPort{spec.Addr}, listeners, local)
		for _, reason := range self {
			s.log.Warn("a nameserver is left out", "reason", reason)
		}
		if len(self) == 0 {
			others = append(others, spec)
		}
	}
	return others
}

// localAddrs returns the addresses of this host.
func localAddrs() ([]netip.Addr, error) {
	var local []netip.Addr
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of this host: %w", err)
	}
	for _, addr := range addrs {
		if prefix, err := netip.ParsePrefix(addr.String()); err == nil {
			local = append(local, prefix.Addr())
		}
	}
	return local, nil
}
