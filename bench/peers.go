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

// startLimit is how long a server may take to be ready: parsing a million lines
// takes some of them that long.
const startLimit = 2 * time.Minute

// A peer is a kind of server that is measured.
type peer struct {
	name, title string
	// echo says that it answers nothing; tcp that it is measured over TCP as well.
	echo, tcp bool
	// fixed is the one address that it answers with, whatever the question.
	fixed netip.Addr
	// prepare builds or finds the binary, writes what it reads, and says how to
	// start it there.
	prepare func(context.Context, *lab, netip.AddrPort) (launch, error)
}

// A launch is how to start a server.
type launch struct {
	argv    []string
	version string
	// status is where it has metrics; the zero value is nowhere.
	status netip.AddrPort
	// ready may be nil: an answer is enough.
	ready func(context.Context) error
}

// peers are all servers there are, in the order of the tables.
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

// peerNames are what -peers takes.
func peerNames() []string {
	var names []string
	for _, p := range peers() {
		names = append(names, p.name)
	}
	return names
}

// prepareEcho is the lower bound.
func prepareEcho(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := l.build(ctx, ".", "echo")
	return launch{argv: []string{binary, addr.String()}}, err
}

// prepareFixed is what the DNS library costs.
func prepareFixed(ip netip.Addr) func(context.Context, *lab, netip.AddrPort) (launch, error) {
	return func(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
		binary, err := l.build(ctx, ".", "fixed")
		version := moduleVersion(binary, "github.com/miekg/dns")
		return launch{argv: []string{binary, addr.String(), ip.String()}, version: version}, err
	}
}

// prepareAgent is what all this is about. It forwards to nobody.
func prepareAgent(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	xds, err := l.sharedControl(ctx)
	if err != nil {
		return launch{}, err
	}
	return l.agent(ctx, addr, xds, l.noUpstream()...)
}

// noUpstream are settings of an agent that is asked for own names only.
func (l *lab) noUpstream() []string {
	return []string{"--resolv-conf", l.path("resolv.conf"), "--upstream", "127.0.0.1:9"}
}

// sharedControl is the address of the control plane that the agents of a lab share.
// It sends them the lab's table.
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

// agent says how to start an agent of the control plane at xds, with some settings
// of its own.
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

// isReady asks a probe.
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

// prepareIstio is the DNS server of Istio's agent, in the module istio/.
func prepareIstio(ctx context.Context, l *lab, addr netip.AddrPort) (launch, error) {
	binary, err := l.build(ctx, "istio", ".")
	return launch{
		argv:    []string{binary, addr.String(), namespace, ownDomain, l.path("table.pb")},
		version: moduleVersion(binary, "istio.io/istio"),
	}, err
}

// prepareCoreDNS is the module coredns/.
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

// moduleVersion is the version of a module that a Go binary was built with, or "".
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
