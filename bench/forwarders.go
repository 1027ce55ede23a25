package main

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
)

// istioName is the server that the agent is to replace.
const istioName = "istio"

// forwarders are servers that have own names and forward the rest to the lab's
// nameservers, the agent first, then Istio's.
func forwarders() []peer {
	return []peer{
		{name: agentName, title: "nametap", prepare: prepareForwardingAgent()},
		{name: istioName, title: "Istio's agent", prepare: prepareForwardingIstio},
		{name: "coredns", title: "CoreDNS, hosts, cache, forward", prepare: prepareForwardingCoreDNS},
		{name: "dnsmasq", title: "dnsmasq", prepare: prepareForwardingDnsmasq},
		{name: "unbound", title: "unbound, forward-zone", prepare: prepareForwardingUnbound},
	}
}

// prepareForwardingAgent is the agent, with settings if any.
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

// prepareForwardingCoreDNS has what a cluster's CoreDNS has, for names that are not
// the cluster's.
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

// prepareForwardingDnsmasq has a cache that holds as many names as it may: 10,000.
func prepareForwardingDnsmasq(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	// More queries under way than the 150 that it allows by default.
	return l.dnsmasq(ctx, addr, "--cache-size=10000", "--dns-forward-max=10000", "--resolv-file="+l.path("resolv.conf"))
}

// prepareForwardingUnbound has one thread and no DNSSEC, as the others have none.
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
