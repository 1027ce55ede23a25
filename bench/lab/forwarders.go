package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"
)

// IstioName is the name of Istio's agent, which nametap replaces.
const IstioName = "istio"

// Forwarders are servers that answer the mesh names and forward all others to the lab's
// nameservers: the agent first, then Istio's.
func Forwarders() []Peer {
	return []Peer{
		{Name: AgentName, Title: "nametap", Prepare: prepareForwardingAgent},
		{Name: IstioName, Title: "Istio's agent", Prepare: prepareIstio},
		{Name: "coredns", Title: "CoreDNS, hosts, cache, forward", Prepare: prepareForwardingCoreDNS},
		{Name: "dnsmasq", Title: "dnsmasq", Prepare: prepareForwardingDnsmasq},
		{Name: "unbound", Title: "unbound, forward-zone", Prepare: prepareForwardingUnbound},
	}
}

// prepareForwardingAgent prepares the agent.
func prepareForwardingAgent(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	xds, err := l.sharedControl(ctx)
	if err != nil {
		return Launch{}, err
	}
	return l.Agent(ctx, addr, xds, "--resolv-conf", l.Path("resolv.conf"))
}

// prepareForwardingCoreDNS uses the plugins of a cluster's CoreDNS for names outside the
// cluster.
func prepareForwardingCoreDNS(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	how, err := prepareCoreDNS(ctx, l, addr)
	if err != nil {
		return how, err
	}
	config := fmt.Appendf(nil, ".:%d {\n  bind %s\n  hosts %s {\n    fallthrough\n  }\n  cache\n  forward . %s\n}\n",
		addr.Port(), addr.Addr(), l.Path("hosts"), l.Path("resolv.conf"))
	path, err := l.Write(fmt.Sprintf("Corefile-forward-%d", addr.Port()), config)
	how.Argv = []string{how.Argv[0], "-quiet", "-conf", path}
	return how, err
}

// prepareForwardingDnsmasq uses the largest cache that dnsmasq allows: 10,000 names.
func prepareForwardingDnsmasq(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	// More queries in flight than the default limit of 150.
	return l.dnsmasq(ctx, addr, "--cache-size=10000", "--dns-forward-max=10000", "--resolv-file="+l.Path("resolv.conf"))
}

// prepareForwardingUnbound uses one thread and no DNSSEC, like the other forwarders.
func prepareForwardingUnbound(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	binary, err := findTool("unbound", "unbound")
	if err != nil {
		return Launch{}, err
	}
	var body bytes.Buffer
	fmt.Fprintf(&body, "  module-config: \"iterator\"\n  do-not-query-localhost: no\n  local-zone: \"%s.\" static\n", clusterDomain)
	l.localData(&body)
	fmt.Fprintf(&body, "forward-zone:\n  name: \".\"\n  forward-addr: %s\n", FirstServer())
	path, err := l.unboundConfig(addr, body.String())
	return Launch{
		Argv:    []string{binary, "-d", "-c", path},
		version: toolVersion(ctx, binary, "-V"),
	}, err
}

// StartForwarder starts a server that forwards to the lab's nameservers, and waits until it
// answers.
func (l *Lab) StartForwarder(ctx context.Context, p Peer, core string) (Instance, string, error) {
	addr, err := FreeAddr(ctx)
	if err != nil {
		return Instance{}, "", err
	}
	how, err := p.Prepare(ctx, l, addr)
	if err != nil {
		return Instance{}, "", err
	}
	started, err := l.Start(ctx, Command{Name: p.Name, Argv: how.Argv, Core: core})
	if err != nil {
		return Instance{}, "", err
	}
	i := Instance{Process: started, Addr: addr}
	own, _ := Mixes()[0].question(l.Services[0])
	err = started.Await(ctx, StartLimit, func(ctx context.Context) error {
		if how.Ready != nil {
			if err := how.Ready(ctx); err != nil {
				return err
			}
		}
		return errors.Join(resolves(ctx, addr, dns.Fqdn(own)), resolves(ctx, addr, probeName))
	})
	return i, how.version, err
}

// resolves returns an error unless a name exists.
func resolves(ctx context.Context, addr netip.AddrPort, name string) error {
	client := dns.Client{Timeout: time.Second}
	reply, _, err := client.ExchangeContext(ctx, new(dns.Msg).SetQuestion(name, dns.TypeA), addr.String())
	if err == nil && reply.Rcode != dns.RcodeSuccess {
		err = errors.New(dns.RcodeToString[reply.Rcode])
	}
	if err != nil {
		return fmt.Errorf("asking for %s: %w", name, err)
	}
	return nil
}

// Compared are the servers of most experiments: nametap and Istio's agent, which it
// replaces.
func Compared() []Peer {
	all := Forwarders()
	return all[:2]
}

// FirstServer returns the address of the first nameserver of the experiments.
func FirstServer() netip.Addr { return Address(127, 2) }

// SecondServer returns the address of the second nameserver of the experiments.
func SecondServer() netip.Addr { return Address(127, 3) }

// Port53 returns the address of a nameserver of resolv.conf.
func Port53(ip netip.Addr) netip.AddrPort { return netip.AddrPortFrom(ip, 53) }
