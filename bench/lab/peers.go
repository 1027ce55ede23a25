package lab

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
	AgentName = "nametap"
	EchoName  = "echo"
)

// StartLimit is the limit of a server's start: some need that long to parse a million
// lines.
const StartLimit = 2 * time.Minute

// A Peer is a kind of server that is measured.
type Peer struct {
	Name, Title string
	// Echo is true for the server without DNS; TCP is true for the servers that are
	// measured over TCP, too.
	Echo, TCP bool
	// fixed is the address in every answer, if the server has only one.
	fixed netip.Addr
	// Prepare builds or finds the binary, writes the server's files, and returns how to
	// start the server.
	Prepare func(context.Context, *Lab, netip.AddrPort) (Launch, error)
}

// A Launch is how to start a server.
type Launch struct {
	Argv    []string
	version string
	// Ready may be nil: then the server is ready once it answers.
	Ready func(context.Context) error
}

// Peers are all servers, in the order of the tables.
func Peers() []Peer {
	fixed := netip.MustParseAddr("10.0.0.1")
	return []Peer{
		{Name: EchoName, Title: "Go echo, no DNS", Echo: true, Prepare: prepareEcho},
		{Name: AgentName, Title: "nametap", TCP: true, Prepare: prepareAgent},
		{Name: "nsd", Title: "NSD", Prepare: prepareNSD},
		{Name: "unbound", Title: "unbound, local-data", Prepare: prepareUnbound},
		{Name: "dnsmasq", Title: "dnsmasq", Prepare: prepareDnsmasq},
		{Name: "miekg", Title: "miekg/dns, one fixed record", TCP: true, fixed: fixed, Prepare: prepareFixed(fixed)},
		{Name: "istio", Title: "Istio's agent", Prepare: prepareIstio},
		{Name: "coredns", Title: "CoreDNS, hosts plugin", Prepare: prepareCoreDNS},
	}
}

// PeerNames are the values of -peers.
func PeerNames() []string {
	var names []string
	for _, p := range Peers() {
		names = append(names, p.Name)
	}
	return names
}

// prepareEcho prepares the lower bound.
func prepareEcho(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	binary, err := l.Build(ctx, ".", "echo")
	return Launch{Argv: []string{binary, addr.String()}}, err
}

// prepareFixed prepares a server that shows the cost of the DNS library.
func prepareFixed(ip netip.Addr) func(context.Context, *Lab, netip.AddrPort) (Launch, error) {
	return func(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
		binary, err := l.Build(ctx, ".", "fixed")
		version := moduleVersion(binary, "github.com/miekg/dns")
		return Launch{Argv: []string{binary, addr.String(), ip.String()}, version: version}, err
	}
}

// prepareAgent prepares nametap's agent, without nameservers.
func prepareAgent(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	xds, err := l.sharedControl(ctx)
	if err != nil {
		return Launch{}, err
	}
	return l.Agent(ctx, addr, xds, l.NoUpstream()...)
}

// NoUpstream are the settings of an agent without nameservers, for mesh names only.
func (l *Lab) NoUpstream() []string {
	return []string{"--resolv-conf", l.Path("resolv.conf"), "--upstream", "127.0.0.1:9"}
}

// sharedControl returns the address of the control plane that the agents of a lab share. It
// sends the lab's table.
func (l *Lab) sharedControl(ctx context.Context) (netip.AddrPort, error) {
	if l.control == nil {
		control, err := l.StartControl(ctx)
		if err != nil {
			return netip.AddrPort{}, err
		}
		if err := control.Send(l.Path("table.pb")); err != nil {
			return netip.AddrPort{}, err
		}
		l.control = control
	}
	return l.control.Addr, nil
}

// Agent returns how to start an agent with the control plane at xds and more settings.
func (l *Lab) Agent(ctx context.Context, addr, xds netip.AddrPort, settings ...string) (Launch, error) {
	binary := l.agentBinary
	if binary == "" {
		built, err := l.Build(ctx, "..", "cmd/nametap")
		if err != nil {
			return Launch{}, err
		}
		binary = built
	}
	status, err := FreeAddr(ctx)
	if err != nil {
		return Launch{}, err
	}
	return Launch{
		Argv: append([]string{
			binary, "agent", "--dns-addr", addr.String(), "--status-addr", status.String(),
			"--xds-addr", xds.String(), "--xds-plaintext", "--namespace", namespace, "--domain", ownDomain,
			"--state-dir", "", "--drain", "0s", "--log-level", "warn",
		}, settings...),
		Ready: func(ctx context.Context) error { return isReady(ctx, "http://"+status.String()+"/healthz/ready") },
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
func prepareIstio(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	binary, err := l.Build(ctx, "istio", ".")
	return Launch{
		Argv:    []string{binary, addr.String(), namespace, ownDomain, l.Path("table.pb")},
		version: moduleVersion(binary, "istio.io/istio"),
	}, err
}

// prepareCoreDNS prepares CoreDNS, in the module coredns/.
func prepareCoreDNS(ctx context.Context, l *Lab, addr netip.AddrPort) (Launch, error) {
	binary, err := l.Build(ctx, "coredns", ".")
	if err != nil {
		return Launch{}, err
	}
	hosts, err := l.Write("hosts", hostsFile(l.Services))
	if err != nil {
		return Launch{}, err
	}
	name := fmt.Sprintf("Corefile-%d", addr.Port())
	config, err := l.Write(name, fmt.Appendf(nil, ".:%d {\n  bind %s\n  hosts %s\n}\n", addr.Port(), addr.Addr(), hosts))
	return Launch{
		Argv:    []string{binary, "-quiet", "-conf", config},
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
