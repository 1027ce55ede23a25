package forward

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

func (f *Forwarder) files() resolvconf.Files { return resolvconf.Files{Path: f.config.ResolvConf} }

// useResolvConf makes the routing from a resolv.conf and uses it. It logs the values that are ignored, and what the option
// rotate means.
func (f *Forwarder) useResolvConf(conf *resolvconf.Config) {
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
	f.mu.Lock()
	defer f.mu.Unlock()
	f.useLocked(conf, f.readLocalLocked())
}

// SetListeners sets the addresses on which the agent listens. A nameserver with such an
// address is the agent itself, and is not asked.
func (f *Forwarder) SetListeners(listeners []netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners = listeners
	f.useLocked(f.routing.Load().conf, f.readLocalLocked())
}

// SetReturned sets the domains for which systemd-resolved queries the agent. Names below them are not
// forwarded to systemd-resolved's stub, because it would send these queries back.
func (f *Forwarder) SetReturned(domains []string) {
	names := make([]wire.Name, 0, len(domains))
	for _, domain := range domains {
		if name, err := wire.ParseHostname(domain); err == nil {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(x, y wire.Name) int { return len(y) - len(x) })
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resolvedDomains = names
	next := *f.routing.Load()
	next.resolvedDomains = names
	f.routing.Store(&next)
}

// Search returns the search list of resolv.conf without the root. The caller must not
// change it.
func (f *Forwarder) Search() []wire.Name { return f.routing.Load().search }

// Suffixes returns the suffixes that have nameservers of their own.
func (f *Forwarder) Suffixes() []wire.Name {
	routes := f.routing.Load().routes
	suffixes := make([]wire.Name, len(routes))
	for i, route := range routes {
		suffixes[i] = route.suffix
	}
	return suffixes
}

// TrustAD reports whether responses to clients have the AD bit of nameservers' replies (trust-ad in
// resolv.conf(5)).
func (f *Forwarder) TrustAD() bool { return f.routing.Load().conf.TrustAD }

// Upstreams returns the nameservers that queries are forwarded to, except the nameservers of
// routes.
func (f *Forwarder) Upstreams() []upstream.Spec {
	return slices.Clone(f.routing.Load().fallback.servers)
}

// Self returns the nameservers that are left out because they are this agent.
func (f *Forwarder) Self() []upstream.Spec { return slices.Clone(f.routing.Load().self) }

// Elsewhere reports whether a captured query is forwarded to its original destination, and not to the nameservers of
// resolv.conf. It reports false if original is not valid.
func (f *Forwarder) Elsewhere(original netip.AddrPort) bool {
	return original.IsValid() && !f.routing.Load().standsFor(original)
}

// addressInterval is how often the addresses of this host are read if there is no signal on Config.AddressesChanged.
const addressInterval = 12 * clock.Tick

// followAddresses makes the routing again when the addresses of this host change, until ctx ends. The address of a
// nameserver may be among the new addresses; then the nameserver may be the agent itself.
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
			continue // the addresses are read again later
		}
		f.mu.Lock()
		if current := f.routing.Load(); !slices.Equal(local, current.local) {
			f.useLocked(current.conf, local)
		}
		f.mu.Unlock()
	}
}

// useLocked makes the routing from a resolv.conf, the settings and the addresses of this host, and
// uses it. If this changes the nameservers for some questions, the cache is flushed, and replies in flight are not cached.
func (f *Forwarder) useLocked(conf *resolvconf.Config, local []netip.Addr) {
	next := &routing{
		conf: conf, resolvedDomains: f.resolvedDomains, local: local,
		ownDomains: f.settings.OwnDomains, ownTTL: f.settings.OwnTTL,
	}
	for _, domain := range conf.Search {
		if name, err := wire.ParseHostname(domain); err == nil && domain != "." {
			next.search = append(next.search, name)
		}
	}
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
		next.self = append(next.self, self...)
		made := route{suffix: suffix, group: f.client.Group(servers, options), servers: servers}
		if slices.ContainsFunc(servers, isStub) {
			made.others = f.client.Group(slices.DeleteFunc(slices.Clone(servers), isStub), options)
		}
		return made
	}
	next.fallback = newRoute(wire.Root, servers)
	for _, r := range f.settings.Routes {
		if suffix, err := wire.ParseHostname(r.Suffix); err == nil { // validate has checked it
			next.routes = append(next.routes, newRoute(suffix, r.Servers))
		}
	}
	slices.SortStableFunc(next.routes, func(x, y route) int { return len(y.suffix) - len(x.suffix) })
	if len(next.fallback.servers) == 0 && f.listeners != nil {
		f.config.Logger.Warn(
			"there is no nameserver: only names of the mesh are answered; name one in resolv.conf or with --upstream",
			"path", f.config.ResolvConf)
	}
	previous := f.routing.Swap(next)
	if previous != nil && !previous.answersLike(next) {
		f.flush(nil)
	}
}

// isStub reports whether a nameserver is systemd-resolved's stub.
func isStub(server upstream.Spec) bool { return resolvconf.IsStub(server.Addr) }

// withoutSelfLocked divides nameservers into nameservers that are other programs, and nameservers that are this
// agent.
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

// readLocalLocked returns the addresses of this host or, after an error, the previous addresses.
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
