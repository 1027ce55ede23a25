package main

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"runtime/debug"
	"time"

	"debug/buildinfo"
)

// The two servers that the others are compared with.
const (
	agentName = "nametap"
	echoName  = "echo"
)

// startLimit is the limit of a server's start: some need that long to parse a million
// lines.
const startLimit = 2 * time.Minute

// A peer is a kind of server that is measured.
type peer struct {
	name, title string
	// echo marks the server without DNS; tcp marks servers that are measured over TCP, too.
	echo, tcp bool
	// fixed is the address in every answer, if the server has only one.
	fixed netip.Addr
	// prepare builds or finds the binary, writes its files, and returns how to start it.
	prepare func(context.Context, *lab, netip.AddrPort) (launch, error)
}

// A launch is how to start a server.
type launch struct {
	argv    []string
	version string
	// status is the address of its metrics, or the zero value.
	status netip.AddrPort
	// ready may be nil: then the server is ready once it answers.
	ready func(context.Context) error
}

// peers are all servers, in the order of the tables.
func peers() []peer {
	fixed := netip.MustParseAddr("10.0.0.1")
	return []peer{
		{name: echoName, title: "Go echo, no DNS", echo: true, prepare: prepareEcho},
		{name: agentName, title: "nametap", tcp: true, prepare: prepareAgent},
		{name: "nsd", title: "NSD", prepare: prepareNSD},
		{name: "unbound", title: "unbound, local-data", prepare: prepareUnbound},
		{name: "dnsmasq", title: "dnsmasq", prepare: prepareDnsmasq},
		{name: "miekg", title: "miekg/dns, one fixed record", tcp: true, fixed: fixed, prepare: prepareFixed(fixed)},
		{name: "istio", title: "Istio's agent", prepare: prepareIstio},
		{name: "coredns", title: "CoreDNS, hosts plugin", prepare: prepareCoreDNS},
	}
}

// peerNames are the values of -peers.
func peerNames() []string {
	var names []string
	for _, p := range peers() {
		names = append(names, p.name)
	}
	return names
}

// prepareEcho prepares the lower bound.
func prepareEcho(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := l.build(ctx, ".", "echo")
	return launch{argv: []string{binary, addr.String()}}, err
}

// prepareFixed prepares a server that shows the cost of the DNS library.
func prepareFixed(ip netip.Addr) func(context.Context, *lab, netip.AddrPort) (launch, error) {
	return func(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
		binary, err := l.build(ctx, ".", "fixed")
		version := moduleVersion(binary, "github.com/miekg/dns")
		return launch{argv: []string{binary, addr.String(), ip.String()}, version: version}, err
	}
}

// prepareAgent prepares nametap's agent, without nameservers.
func prepareAgent(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	xds, err := l.sharedControl(ctx)
	if err != nil {
		return launch{}, err
	}
	return l.agent(ctx, addr, xds, l.noUpstream()...)
}

// noUpstream are the settings of an agent without nameservers, for mesh names only.
func (l *lab) noUpstream() []string {
	return []string{"--resolv-conf", l.path("resolv.conf"), "--upstream", "127.0.0.1:9"}
}

// sharedControl returns the address of the control plane that the agents of a lab share. It
// sends the lab's table.
func (l *lab) sharedControl(ctx context.Context) (netip.AddrPort, error) {
	if l.control == nil {
		control, err := l.startControl(ctx)
		if err != nil {
			return netip.AddrPort{}, err
		}
		if err := control.send(l.path("table.pb")); err != nil {
			return netip.AddrPort{}, err
		}
		l.control = control
	}
	return l.control.addr, nil
}

// agent returns how to start an agent with the control plane at xds and more settings.
func (l *lab) agent(ctx context.Context, addr, xds netip.AddrPort, settings ...string) (launch, error) {
	binary := l.agentBinary
	if binary == "" {
		built, err := l.build(ctx, "..", "cmd/nametap")
		if err != nil {
			return launch{}, err
		}
		binary = built
	}
	status, err := freeAddr(ctx)
	if err != nil {
		return launch{}, err
	}
	return launch{
		argv: append([]string{
			binary, "agent", "--dns-addr", addr.String(), "--status-addr", status.String(),
			"--xds-addr", xds.String(), "--xds-plaintext", "--namespace", namespace, "--domain", ownDomain,
			"--state-dir", "", "--drain", "0s", "--ready-timeout", "10m", "--log-level", "warn",
		}, settings...),
		status: status,
		ready:  func(ctx context.Context) error { return isReady(ctx, "http://"+status.String()+"/healthz/ready") },
	}, nil
}

// isReady returns an error unless the readiness probe succeeds.
func isReady(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return fmt.Errorf("making a request: %w", err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("sending a probe: %w", err)
	}
	if err := response.Body.Close(); err != nil {
		return fmt.Errorf("sending a probe: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("the probe returns %s", response.Status)
	}
	return nil
}

// prepareIstio prepares the DNS server of Istio's agent, in the module istio/.
func prepareIstio(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := l.build(ctx, "istio", ".")
	return launch{
		argv:    []string{binary, addr.String(), namespace, ownDomain, l.path("table.pb")},
		version: moduleVersion(binary, "istio.io/istio"),
	}, err
}

// prepareCoreDNS prepares CoreDNS, in the module coredns/.
func prepareCoreDNS(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := l.build(ctx, "coredns", ".")
	if err != nil {
		return launch{}, err
	}
	hosts, err := l.write("hosts", hostsFile(l.services))
	if err != nil {
		return launch{}, err
	}
	name := fmt.Sprintf("Corefile-%d", addr.Port())
	config, err := l.write(name, fmt.Appendf(nil, ".:%d {\n  bind %s\n  hosts %s\n}\n", addr.Port(), addr.Addr(), hosts))
	return launch{
		argv:    []string{binary, "-quiet", "-conf", config},
		version: moduleVersion(binary, "github.com/coredns/coredns"),
	}, err
}

// moduleVersion returns the version of a module in a Go binary, or an empty string.
func moduleVersion(binary, module string) string {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return ""
	}
	return dependency(info, module)
}

// dependency looks a module up.
func dependency(info *debug.BuildInfo, module string) string {
	for _, dep := range info.Deps {
		if dep.Path == module {
			return dep.Version
		}
	}
	return ""
}
