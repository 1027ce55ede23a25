package forward

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/nametap/nametap/dnsproxy/cache"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// A routing says which nameservers to ask for a name, by resolv.conf and the settings. It
// never changes; when one of them changes, a new routing replaces it.
type routing struct {
	self    []upstream.Spec // nameservers that are this agent, and left out
	timeout time.Duration   // bounds the time of a query

	conf     *resolvconf.Config
	search   []wire.Name // of conf, without the root
	routes   []route     // the longest suffix first
	fallback route
	returned []wire.Name  // domains whose names systemd-resolved sends back, the longest first
	local    []netip.Addr // addresses of this host
}

// A route is a [Route] in use. The route of resolv.conf has no suffix.
type route struct {
	suffix  wire.Name
	group   *upstream.Group
	servers []upstream.Spec // of group
	// others are the servers without systemd-resolved's stub; nil if it is not among them.
	others *upstream.Group
}

// route returns the route of a name.
func (r *routing) route(name wire.Name) *route {
	for i := range r.routes {
		if name.Below(r.routes[i].suffix) {
			return &r.routes[i]
		}
	}
	return &r.fallback
}

// group returns the nameservers to ask for a name.
func (r *routing) group(name wire.Name) *upstream.Group {
	found := r.route(name)
	if found.others != nil {
		if _, returned := name.BelowAny(r.returned); returned {
			return found.others
		}
	}
	return found.group
}

// query returns the query for a question in wire form, with an OPT record of its own:
// clients' OPT records are for this hop (RFC 6891, section 6.2.1).
func (r *routing) query(key cache.Key) []byte {
	var room [wire.MaxNameLen + 1 + 4]byte // keeps the question off the heap
	packet := wire.NewQuery(wire.AppendQuestion(room[:0], wire.Name(key.Name), key.Type, key.Class))
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
	wire.PutCount(packet, wire.AdditionalSection, 1)
	return wire.AppendOPT(packet, ednsUDPSize, ttl)
}

// standsFor reports whether resolv.conf's nameservers are asked instead of the original
// destination of a captured query: because it is one of them.
//
// If resolv.conf names a forwarder on this host, then a query for another of its
// nameservers comes from that forwarder, or from a client that has given up on it. In both
// cases it is meant for that nameserver, and the forwarder would send it back to the agent.
func (r *routing) standsFor(server netip.AddrPort) bool {
	if r.conf.Uplink != "" && server.Addr().IsLoopback() {
		return true // systemd-resolved's stub: the nameservers behind it are asked
	}
	if a := server.Addr(); a.Is6() && a.IsLinkLocalUnicast() && a.Zone() == "" {
		return true // the kernel does not say on which interface it was sent
	}
	if v4, v6 := testAddrs(); server.Addr() == v4 || server.Addr() == v6 {
		return true
	}
	onHost := func(server netip.AddrPort) bool {
		return server.Addr().IsLoopback() || slices.Contains(r.local, server.Addr())
	}
	return slices.Contains(r.conf.Servers, server) && (onHost(server) || !slices.ContainsFunc(r.conf.Servers, onHost))
}

// testAddrs returns the addresses that the capture rules redirect for all users, to test
// themselves (iptables.TestAddr). A query that is forwarded to them would come back.
func testAddrs() (v4, v6 netip.Addr) {
	return netip.AddrFrom4([4]byte{127, 15, 0, 53}), netip.AddrFrom16([16]byte{0: 1, 15: 53})
}

// A suffixRoute is a [Route] as the configuration has it, its suffix in wire form.
type suffixRoute struct {
	suffix  wire.Name
	servers []upstream.Spec
}

// parseRoutes parses routes and sorts them, the longest suffix first.
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

func (f *Forwarder) files() resolvconf.Files { return resolvconf.Files{Path: f.config.ResolvConf} }

// readResolvConf makes the first routing.
func (f *Forwarder) readResolvConf() {
	conf, err := f.files().Read()
	switch kept := f.readKept(conf); {
	case kept != nil:
		f.config.Logger.Warn("resolv.conf cannot be used: its content of before the restart stays in use",
			"path", f.config.ResolvConf, "error", err)
		conf = kept
	case err != nil:
		f.config.Logger.Warn("resolv.conf cannot be used: there is no search list, and only nameservers of --upstream are used",
			"path", f.config.ResolvConf, "error", err)
		conf = resolvconf.Parse(nil)
	default:
		f.keep()
	}
	f.logIgnored(conf)
	f.useResolvConf(conf)
}

// readKept returns what an earlier process has kept of resolv.conf, if the file cannot be used:
// conf is nil, or has no nameserver although there is no other. Otherwise it returns nil.
func (f *Forwarder) readKept(conf *resolvconf.Config) *resolvconf.Config {
	if f.config.KeptResolvConf == "" || conf != nil && (len(conf.Servers) > 0 || len(f.settings.Upstreams) > 0) {
		return nil
	}
	kept, err := resolvconf.Files{Path: f.config.KeptResolvConf}.Read()
	if err != nil { // there was no earlier process
		return nil
	}
	return kept
}

// keep keeps resolv.conf for a later process.
func (f *Forwarder) keep() {
	if f.config.KeptResolvConf == "" {
		return
	}
	if err := f.files().Keep(f.config.KeptResolvConf); err != nil {
		f.config.Logger.Warn("resolv.conf cannot be kept for the next start", "error", err)
	}
}

// watcher returns what follows resolv.conf.
func (f *Forwarder) watcher() *resolvconf.Watcher {
	return &resolvconf.Watcher{
		Files: f.files(), Clock: f.config.Clock, Current: f.routing.Load().conf,
		Changed: func(conf *resolvconf.Config) {
			f.config.Logger.Info("resolv.conf has changed", "path", f.config.ResolvConf,
				"nameservers", conf.Servers, "search", conf.Search)
			f.keep()
			f.logIgnored(conf)
			f.useResolvConf(conf)
		},
		Failed: func(err error) {
			f.metrics.resolvConfErrors.Inc()
			f.config.Logger.Warn("resolv.conf cannot be used any more: its previous content stays in use",
				"path", f.config.ResolvConf, "error", err)
		},
	}
}

// logIgnored logs what of a resolv.conf is ignored, or means something else.
func (f *Forwarder) logIgnored(conf *resolvconf.Config) {
	ignored := slices.Clone(conf.Ignored)
	for _, domain := range conf.Search {
		if _, err := wire.ParseHostname(domain); err != nil && domain != "." {
			ignored = append(ignored, fmt.Sprintf("search %q: want a domain name: %v", domain, err))
		}
	}
	for _, value := range ignored {
		f.config.Logger.Warn("resolv.conf: a value is left out", "path", f.config.ResolvConf, "value", value)
	}
	if conf.Rotate {
		f.config.Logger.Info("resolv.conf: options rotate means upstream-order fastest", "path", f.config.ResolvConf)
	}
}

// SetListeners says on which addresses the agent listens. A nameserver with such an
// address is the agent itself and is left out (F6).
func (f *Forwarder) SetListeners(listeners []netip.AddrPort) {
	f.changing.Lock()
	defer f.changing.Unlock()
	f.listeners = listeners
	f.useLocked(f.routing.Load().conf, f.readLocalLocked())
}

// SetReturned says for which domains systemd-resolved queries the agent. Its stub is not asked
// for names below them, because it would send these queries back (F6).
func (f *Forwarder) SetReturned(domains []string) {
	returned := make([]wire.Name, 0, len(domains))
	for _, domain := range domains {
		if name, err := wire.ParseHostname(domain); err == nil {
			returned = append(returned, name)
		}
	}
	slices.SortFunc(returned, func(x, y wire.Name) int { return len(y) - len(x) })
	f.changing.Lock()
	defer f.changing.Unlock()
	f.returned = returned
	next := *f.routing.Load()
	next.returned = returned
	f.routing.Store(&next)
}

// useResolvConf makes the routing of a resolv.conf and uses it.
func (f *Forwarder) useResolvConf(conf *resolvconf.Config) {
	f.changing.Lock()
	defer f.changing.Unlock()
	f.useLocked(conf, f.readLocalLocked())
}

// addressInterval is how often the addresses of this host are read without a signal on Config.AddressesChanged.
const addressInterval = 12 * clock.Tick

// followAddresses makes the routing again when the addresses of this host change, until
// ctx ends: a nameserver's address may be among the new ones.
func (f *Forwarder) followAddresses(ctx context.Context) {
	recheck, stop := f.config.Clock.Poll(addressInterval, func() bool { return true })
	defer stop()
	for {
		select {
		case <-f.config.AddressesChanged:
		case <-recheck:
		case <-ctx.Done():
			return
		}
		local, err := localAddrs()
		if err != nil {
			continue // and read again
		}
		f.changing.Lock()
		if current := f.routing.Load(); !slices.Equal(local, current.local) {
			f.useLocked(current.conf, local)
		}
		f.changing.Unlock()
	}
}

// useLocked makes the routing of a resolv.conf, the settings and the addresses of this host, and
// uses it. If that changes the nameservers for a question, it removes the question's replies
// from the cache, and replies in flight are not cached.
func (f *Forwarder) useLocked(conf *resolvconf.Config, local []netip.Addr) {
	r := &routing{conf: conf, returned: f.returned, local: local, timeout: f.settings.Timeout}
	r.readSearch()
	servers := f.settings.Upstreams
	if len(servers) == 0 {
		for _, addr := range conf.Servers {
			servers = append(servers, upstream.Spec{Addr: addr})
		}
	}
	options := upstream.Options{
		Fastest: f.settings.Order == OrderFastest || conf.Rotate, UseVC: conf.UseVC,
		Timeout: conf.Timeout, Attempts: conf.Attempts,
	}
	newRoute := func(suffix wire.Name, servers []upstream.Spec) route {
		servers, self := f.withoutSelfLocked(servers, local)
		r.self = append(r.self, self...)
		made := route{suffix: suffix, group: f.client.Group(servers, options), servers: servers}
		if slices.ContainsFunc(servers, isStub) {
			made.others = f.client.Group(slices.DeleteFunc(slices.Clone(servers), isStub), options)
		}
		return made
	}
	r.fallback = newRoute(wire.Root, servers)
	for _, sr := range f.settings.routes {
		r.routes = append(r.routes, newRoute(sr.suffix, sr.servers))
	}
	if len(r.fallback.servers) == 0 && f.listeners != nil {
		f.config.Logger.Warn("there is no nameserver: only names of the mesh are answered; name one in resolv.conf or with --upstream",
			"path", f.config.ResolvConf)
	}
	previous := f.routing.Swap(r)
	if previous != nil && !previous.answersLike(r) {
		f.flush(previous.differs(r))
	}
}

// isStub reports whether a nameserver is systemd-resolved's stub.
func isStub(server upstream.Spec) bool { return resolvconf.IsStub(server.Addr) }

// readSearch sets the fields for the search list of resolv.conf.
func (r *routing) readSearch() {
	for _, domain := range r.conf.Search {
		if name, err := wire.ParseHostname(domain); err == nil && domain != "." {
			r.search = append(r.search, name)
		}
	}
}

// answersLike reports whether both routings ask the same nameservers in the same way.
func (r *routing) answersLike(other *routing) bool {
	same := func(x, y route) bool { return x.suffix == y.suffix && slices.Equal(x.servers, y.servers) }
	return same(r.fallback, other.fallback) && slices.EqualFunc(r.routes, other.routes, same) &&
		r.conf.TrustAD == other.conf.TrustAD
}

// differs returns a function that reports whether the answer to a question may differ because the
// other routing asks other nameservers; nil if all answers may.
func (r *routing) differs(other *routing) func(cache.Key) bool {
	if r.conf.TrustAD != other.conf.TrustAD {
		return nil
	}
	return func(k cache.Key) bool {
		name := wire.Name(k.Name)
		return !slices.Equal(r.route(name).servers, other.route(name).servers)
	}
}

// withoutSelfLocked splits the nameservers into other programs' and this agent itself (F6).
func (f *Forwarder) withoutSelfLocked(specs []upstream.Spec, local []netip.Addr) (others, agent []upstream.Spec) {
	for _, spec := range specs {
		_, self := resolvconf.WithoutSelf([]netip.AddrPort{spec.Addr}, f.listeners, local)
		for _, reason := range self {
			f.config.Logger.Warn("a nameserver is left out", "reason", reason)
		}
		if len(self) == 0 {
			others = append(others, spec)
		} else {
			agent = append(agent, spec)
		}
	}
	return others, agent
}

// readLocalLocked returns the addresses of this host, after an error the previous ones.
func (f *Forwarder) readLocalLocked() []netip.Addr {
	local, err := localAddrs()
	if err == nil {
		return local
	}
	f.config.Logger.Warn("the addresses of this host cannot be read now and are read again", "error", err)
	if previous := f.routing.Load(); previous != nil {
		return previous.local
	}
	return nil
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
