package forward

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// A router makes the routing, and makes it again when the settings, resolv.conf or the addresses of this host change.
// Its methods are safe for concurrent use.
type router struct {
	config  Config // the Config that New got; settings that Configure changes are in the field settings
	client  *upstream.Client
	failed  func() // called when resolv.conf becomes unusable
	changed func() // called when the nameservers for some questions change
	routing atomic.Pointer[routing]

	mu              sync.Mutex       // held while the routing is made
	settings        settings         // guarded by mu
	listeners       []netip.AddrPort // guarded by mu
	resolvedDomains []wire.Name      // see SetReturned; guarded by mu
}

// newRouter returns a router without a routing. The caller must call readResolvConf before any other method.
func newRouter(s settings, client *upstream.Client, changed, failed func()) *router {
	return &router{config: s.Config, settings: s, client: client, changed: changed, failed: failed}
}

// readResolvConf makes the first routing.
func (r *router) readResolvConf() {
	conf, err := r.files().Read()
	if err != nil {
		r.config.Logger.Warn(
			"resolv.conf cannot be used: there is no search list, and only nameservers of --upstream are used",
			"path", r.config.ResolvConf, "error", err)
		conf = resolvconf.Parse(nil)
	}
	r.logIgnored(conf)
	r.useResolvConf(conf)
}

func (r *router) files() resolvconf.Files { return resolvconf.Files{Path: r.config.ResolvConf} }

// useResolvConf makes the routing from a resolv.conf and uses it.
func (r *router) useResolvConf(conf *resolvconf.Config) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.useLocked(conf, r.readLocalLocked())
}

// configure changes the settings. Before it uses the new routing, it calls prepare with the previous settings.
func (r *router) configure(next settings, prepare func(previous *settings)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	previous := r.settings
	r.settings = next
	r.client.Configure(next.client())
	prepare(&previous)
	r.useLocked(r.routing.Load().conf, r.readLocalLocked())
}

// SetListeners sets the addresses on which the agent listens. A nameserver with such an
// address is the agent itself, and is not asked.
func (r *router) SetListeners(listeners []netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.listeners = listeners
	r.useLocked(r.routing.Load().conf, r.readLocalLocked())
}

// SetReturned sets the domains for which systemd-resolved queries the agent. Names below them are not
// forwarded to systemd-resolved's stub, because it would send these queries back.
func (r *router) SetReturned(domains []string) {
	names := make([]wire.Name, 0, len(domains))
	for _, domain := range domains {
		if name, err := wire.ParseHostname(domain); err == nil {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(x, y wire.Name) int { return len(y) - len(x) })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.resolvedDomains = names
	next := *r.routing.Load()
	next.resolvedDomains = names
	r.routing.Store(&next)
}

// Search returns the search list of resolv.conf without the root. The caller must not
// change it.
func (r *router) Search() []wire.Name { return r.routing.Load().search }

// Suffixes returns the suffixes that have nameservers of their own.
func (r *router) Suffixes() []wire.Name {
	routes := r.routing.Load().routes
	suffixes := make([]wire.Name, len(routes))
	for i, route := range routes {
		suffixes[i] = route.suffix
	}
	return suffixes
}

// TrustAD reports whether responses to clients have the AD bit of nameservers' replies (trust-ad in
// resolv.conf(5)).
func (r *router) TrustAD() bool { return r.routing.Load().conf.TrustAD }

// Upstreams returns the nameservers that queries are forwarded to, except the nameservers of
// routes.
func (r *router) Upstreams() []upstream.Spec {
	return slices.Clone(r.routing.Load().fallback.servers)
}

// Self returns the nameservers that are left out because they are this agent.
func (r *router) Self() []upstream.Spec { return slices.Clone(r.routing.Load().self) }

// Elsewhere reports whether a captured query is forwarded to its original destination, and not to the nameservers of
// resolv.conf. It reports false if original is not valid.
func (r *router) Elsewhere(original netip.AddrPort) bool {
	return original.IsValid() && !r.routing.Load().standsFor(original)
}

// watch applies changes of resolv.conf and of the addresses of this host, until ctx ends.
func (r *router) watch(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.watcher().Run(ctx) })
	group.Go(func() error {
		r.followAddresses(ctx)
		return nil
	})
	return group.Wait()
}

// watcher returns a watcher of resolv.conf.
func (r *router) watcher() *resolvconf.Watcher {
	return &resolvconf.Watcher{
		Files: r.files(), Clock: r.config.Clock, Current: r.routing.Load().conf,
		Changed: func(conf *resolvconf.Config) {
			r.config.Logger.Info("resolv.conf has changed", "path", r.config.ResolvConf,
				"nameservers", conf.Servers, "search", conf.Search)
			r.logIgnored(conf)
			r.useResolvConf(conf)
		},
		Failed: func(err error) {
			r.failed()
			r.config.Logger.Warn("resolv.conf cannot be used any more: its previous content stays in use",
				"path", r.config.ResolvConf, "error", err)
		},
	}
}

// logIgnored logs the values of a resolv.conf that are ignored, and what the option rotate means.
func (r *router) logIgnored(conf *resolvconf.Config) {
	ignored := slices.Clone(conf.Ignored)
	for _, domain := range conf.Search {
		if _, err := wire.ParseHostname(domain); err != nil && domain != "." {
			ignored = append(ignored, fmt.Sprintf("search %q: want a domain name: %v", domain, err))
		}
	}
	for _, value := range ignored {
		r.config.Logger.Warn("resolv.conf: a value is left out", "path", r.config.ResolvConf, "value", value)
	}
	if conf.Rotate {
		r.config.Logger.Info("resolv.conf: options rotate means upstream-order fastest", "path", r.config.ResolvConf)
	}
}

// addressInterval is how often the addresses of this host are read if there is no signal on Config.AddressesChanged.
const addressInterval = 12 * clock.Tick

// followAddresses makes the routing again when the addresses of this host change, until ctx ends. The address of a
// nameserver may be among the new addresses; then the nameserver may be the agent itself.
func (r *router) followAddresses(ctx context.Context) {
	recheck, stop := r.config.Clock.Poll(addressInterval, func() bool { return true })
	defer stop()
	for {
		select {
		case <-r.config.AddressesChanged:
		case <-recheck:
		case <-ctx.Done():
			return
		}
		local, err := localAddrs()
		if err != nil {
			continue // the addresses are read again later
		}
		r.mu.Lock()
		if current := r.routing.Load(); !slices.Equal(local, current.local) {
			r.useLocked(current.conf, local)
		}
		r.mu.Unlock()
	}
}

// useLocked makes the routing from a resolv.conf, the settings and the addresses of this host, and
// uses it. If this changes the nameservers for some questions, the cache is flushed, and replies in flight are not cached.
func (r *router) useLocked(conf *resolvconf.Config, local []netip.Addr) {
	next := &routing{
		conf: conf, resolvedDomains: r.resolvedDomains, local: local,
		ownDomains: r.settings.OwnDomains, ownTTL: r.settings.OwnTTL,
	}
	next.readSearch()
	servers := r.settings.Upstreams
	if len(servers) == 0 {
		for _, addr := range conf.Servers {
			servers = append(servers, upstream.Spec{Addr: addr})
		}
	}
	options := upstream.Options{
		Fastest: r.settings.Order == OrderFastest || conf.Rotate, UseVC: conf.UseVC,
		Timeout: conf.Timeout, Attempts: conf.Attempts,
	}
	newRoute := func(suffix wire.Name, servers []upstream.Spec) route {
		servers, self := r.withoutSelfLocked(servers, local)
		next.self = append(next.self, self...)
		made := route{suffix: suffix, group: r.client.Group(servers, options), servers: servers}
		if slices.ContainsFunc(servers, isStub) {
			made.others = r.client.Group(slices.DeleteFunc(slices.Clone(servers), isStub), options)
		}
		return made
	}
	next.fallback = newRoute(wire.Root, servers)
	for _, sr := range r.settings.routes {
		next.routes = append(next.routes, newRoute(sr.suffix, sr.servers))
	}
	if len(next.fallback.servers) == 0 && r.listeners != nil {
		r.config.Logger.Warn(
			"there is no nameserver: only names of the mesh are answered; name one in resolv.conf or with --upstream",
			"path", r.config.ResolvConf)
	}
	previous := r.routing.Swap(next)
	if previous != nil && !previous.answersLike(next) {
		r.changed()
	}
}

// isStub reports whether a nameserver is systemd-resolved's stub.
func isStub(server upstream.Spec) bool { return resolvconf.IsStub(server.Addr) }

// withoutSelfLocked divides nameservers into nameservers that are other programs, and nameservers that are this
// agent.
func (r *router) withoutSelfLocked(specs []upstream.Spec, local []netip.Addr) (others, agent []upstream.Spec) {
	for _, spec := range specs {
		_, self := resolvconf.WithoutSelf([]netip.AddrPort{spec.Addr}, r.listeners, local)
		for _, reason := range self {
			r.config.Logger.Warn("a nameserver is left out", "reason", reason)
		}
		if len(self) == 0 {
			others = append(others, spec)
		} else {
			agent = append(agent, spec)
		}
	}
	return others, agent
}

// readLocalLocked returns the addresses of this host or, after an error, the previous addresses.
func (r *router) readLocalLocked() []netip.Addr {
	local, err := localAddrs()
	if err == nil {
		return local
	}
	r.config.Logger.Warn("the addresses of this host cannot be read now and are read again", "error", err)
	if previous := r.routing.Load(); previous != nil {
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
