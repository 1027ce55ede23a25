package main

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
)

// istioName is the name of Istio's agent, which nametap replaces.
const istioName = "istio"

// forwarders are servers that answer the mesh names and forward all others to the lab's
// nameservers: the agent first, then Istio's.
func forwarders() []peer {
	return []peer{
		{name: agentName, title: "nametap", prepare: prepareForwardingAgent()},
		{name: istioName, title: "Istio's agent", prepare: prepareForwardingIstio},
		{name: "coredns", title: "CoreDNS, hosts, cache, forward", prepare: prepareForwardingCoreDNS},
		{name: "dnsmasq", title: "dnsmasq", prepare: prepareForwardingDnsmasq},
		{name: "unbound", title: "unbound, forward-zone", prepare: prepareForwardingUnbound},
	}
}

// prepareForwardingAgent prepares the agent, with more settings.
func prepareForwardingAgent(settings ...string) func(context.Context, *lab, netip.AddrPort) (launch, error) {
	return func(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
		xds, err := l.sharedControl(ctx)
		if err != nil {
			return launch{}, err
		}
		return l.agent(ctx, addr, xds, append([]string{"--resolv-conf", l.path("resolv.conf")}, settings...)...)
	}
}

// prepareForwardingIstio reads /etc/resolv.conf when it starts.
func prepareForwardingIstio(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	how, err := prepareIstio(ctx, l, addr)
	if err != nil {
		return how, err
	}
	how.status, err = freeAddr(ctx)
	how.argv = append(how.argv, how.status.String())
	return how, err
}

// prepareForwardingCoreDNS uses the plugins of a cluster's CoreDNS for names outside the
// cluster.
func prepareForwardingCoreDNS(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	how, err := prepareCoreDNS(ctx, l, addr)
	if err != nil {
		return how, err
	}
	config := fmt.Appendf(nil, ".:%d {\n  bind %s\n  hosts %s {\n    fallthrough\n  }\n  cache\n  forward . %s\n}\n",
		addr.Port(), addr.Addr(), l.path("hosts"), l.path("resolv.conf"))
	path, err := l.write(fmt.Sprintf("Corefile-forward-%d", addr.Port()), config)
	how.argv = []string{how.argv[0], "-quiet", "-conf", path}
	return how, err
}

// prepareForwardingDnsmasq uses the largest cache that dnsmasq allows: 10,000 names.
func prepareForwardingDnsmasq(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	// More queries in flight than the default limit of 150.
	return l.dnsmasq(ctx, addr, "--cache-size=10000", "--dns-forward-max=10000", "--resolv-file="+l.path("resolv.conf"))
}

// prepareForwardingUnbound uses one thread and no DNSSEC, like the others.
func prepareForwardingUnbound(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := findTool("unbound", "unbound")
	if err != nil {
		return launch{}, err
	}
	var body bytes.Buffer
	fmt.Fprintf(&body, "  module-config: \"iterator\"\n  do-not-query-localhost: no\n  local-zone: \"%s.\" static\n", clusterDomain)
	l.localData(&body)
	fmt.Fprintf(&body, "forward-zone:\n  name: \".\"\n  forward-addr: %s\n", firstServer())
	path, err := l.unboundConfig(addr, body.String())
	return launch{
		argv:    []string{binary, "-d", "-c", path},
		version: toolVersion(ctx, binary, "-V"),
	}, err
}
