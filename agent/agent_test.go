package agent_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

func TestMain(m *testing.M) {
	wait.Main(m)
}

// config returns the configuration of an agent on free ports.
func config(t *testing.T, xdsAddr string) agent.Config {
	t.Helper()
	return agent.Config{
		DNS: dnsproxy.Config{
			Addr: "127.0.0.1:0", Namespace: "ns1", Domain: "ns1.svc.cluster.local", ID: "web-0", Version: "nametap test",
			Forward: forward.Config{ResolvConf: filepath.Join(t.TempDir(), "absent")},
		},
		XDS: nds.Config{Addr: xdsAddr, Plaintext: true, Node: nds.Node{
			PodName: "web-0", Namespace: "ns1", IPs: []netip.Addr{netip.MustParseAddr("10.1.2.3")},
		}},
		StatusAddr: "127.0.0.1:0",
		SocketDirs: []string{t.TempDir()},
		Logger:     slog.New(slog.DiscardHandler),
	}
}

// running is an agent that runs. A test may end it before its own end.
type running struct {
	*agent.Agent
	private *http.Client // of its private socket
	end     context.CancelFunc
	done    chan error
}

// start runs an agent until the test ends.
func start(t *testing.T, cfg agent.Config) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	a, err := agent.New(ctx, cfg)
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	r := &running{Agent: a, private: privateClient(cfg, a), end: cancel, done: make(chan error, 1)}
	go func() { r.done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		r.wait(t)
		http.DefaultClient.CloseIdleConnections()
	})
	return r
}

// wait waits until Run returns, and fails the test if it returns an error.
func (r *running) wait(t *testing.T) {
	t.Helper()
	err := wait.For(t, "Run returns", r.done)
	r.done <- nil // for the next call of wait
	if err != nil {
		t.Errorf("Run: %v", err)
	}
}

// await waits until the agent listens, and until it has a table if synced is set.
func (r *running) await(t *testing.T, synced bool) {
	t.Helper()
	ready := r.Proxy().Ready()
	if synced {
		ready = r.Ready()
	}
	select {
	case <-ready:
	case err := <-r.done:
		t.Fatalf("Run: %v", err)
	}
}

// exchange sends the agent a query, and returns the response.
func (r *running) exchange(name string, rrtype uint16) (*dns.Msg, error) {
	client := dns.Client{Timeout: time.Hour}
	resp, _, err := client.Exchange(new(dns.Msg).SetQuestion(name, rrtype), r.dnsAddr())
	return resp, err
}

func (r *running) dnsAddr() string { return r.Proxy().Addrs()[0].Address }

// privateClient returns a client of an agent's private socket.
func privateClient(cfg agent.Config, a *agent.Agent) *http.Client {
	paths := agent.SocketPaths(cfg.SocketDirs, a.StatusAddr())
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return agent.DialPrivate(ctx, paths)
	}}}
}

// get sends a request to an endpoint of the private socket, which has all of them.
func (r *running) get(t *testing.T, path string) (code int, body string) {
	t.Helper()
	return get(t, r.private, r.StatusAddr(), path)
}

// get sends a request to a status endpoint.
func get(t *testing.T, client *http.Client, addr, path string) (code int, body string) {
	t.Helper()
	resp, err := client.Get("http://" + addr + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// webTable has one Service.
func webTable() *api.NameTable {
	return &api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		"web.ns1.svc.cluster.local": {Registry: "Kubernetes", Shortname: "web", Namespace: "ns1", Ips: []string{"10.1.1.1"}},
	}}
}

// R1: while the agent drains it is not ready, but it answers. A query that is in flight at the
// end of the drain is still answered.
func TestDrain(t *testing.T) {
	t.Parallel()
	arrived, release := make(chan struct{}), make(chan struct{})
	var first sync.Once
	nameserver := fakedns.Start(t, func(query *dns.Msg, _ string) *dns.Msg {
		first.Do(func() { close(arrived) }) // it is asked again when it is late
		<-release
		return new(dns.Msg).SetReply(query)
	})
	control := fakexds.Start(t, fakexds.Options{})
	control.Push(webTable())
	cfg := config(t, control.Addr())
	cfg.DNS.Forward.Upstreams = []upstream.Spec{{Addr: nameserver.Addr}}
	cfg.DNS.Forward.Timeout, cfg.Drain = time.Hour, time.Hour
	a := start(t, cfg)
	a.await(t, true)

	inFlight := make(chan error, 1)
	go func() {
		_, err := a.exchange("www.example.org.", dns.TypeA)
		inFlight <- err
	}()
	<-arrived
	a.end()
	for {
		if code, body := a.get(t, "/healthz/ready"); code == http.StatusServiceUnavailable {
			if body != "draining\n" {
				t.Errorf("not ready for %q, want draining", body)
			}
			break
		}
	}
	if _, err := a.exchange("web.", dns.TypeA); err != nil {
		t.Errorf("a query while draining: %v", err)
	}
	a.Hasten()
	wait.Until(t, "the drain is over", func() bool {
		conn, err := net.Dial("tcp", a.dnsAddr())
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	})
	close(release)
	if err := <-inFlight; err != nil {
		t.Errorf("the query in flight: %v", err)
	}
	a.wait(t)
}

// R2: without a table the agent is not ready, but no longer than ReadyTimeout.
func TestReadyTimeout(t *testing.T) {
	t.Parallel()
	control := fakexds.Start(t, fakexds.Options{})
	cfg := config(t, control.Addr())
	cfg.ReadyTimeout = time.Hour
	a := start(t, cfg)
	a.await(t, false)
	if code, body := a.get(t, "/healthz/ready"); code != http.StatusServiceUnavailable || !strings.Contains(body, "no table") {
		t.Errorf("without a table: %d %s", code, body)
	}
	wait.Until(t, "it is live", func() bool { // on a busy machine, a probe of a listener may have no answer in time
		code, _ := a.get(t, "/healthz/live")
		return code == http.StatusOK
	})

	cfg = config(t, control.Addr())
	cfg.ReadyTimeout = time.Nanosecond
	a = start(t, cfg)
	a.await(t, false)
	if code, body := a.get(t, "/healthz/ready"); code != http.StatusOK {
		t.Errorf("after the time-out: %d %s", code, body)
	}
	control.Push(webTable())
	a.await(t, true)
}

// R3: a DNS address that cannot be opened ends the agent with an error that names it.
func TestAddressInUse(t *testing.T) {
	t.Parallel()
	taken := fakedns.Start(t, fakedns.Rcode(dns.RcodeRefused)).Addr.String() // over UDP and TCP
	cfg := config(t, "127.0.0.1:1")
	cfg.DNS.Addr = taken
	a, err := agent.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Run(t.Context()); err == nil || !strings.Contains(err.Error(), cfg.DNS.Addr) {
		t.Errorf("DNS address in use: %v", err)
	}
}

// The set address of the node comes first. The addresses of the interfaces follow.
// Loopback is an address of the node only if it has no other.
func TestInstanceIPs(t *testing.T) {
	t.Parallel()
	given := netip.MustParseAddr("2001:db8::7")
	ips, err := agent.InstanceIPs(given)
	if err != nil || len(ips) == 0 || ips[0] != given {
		t.Errorf("InstanceIPs(%s) = %v, %v", given, ips, err)
	}
	ips, err = agent.InstanceIPs(netip.Addr{})
	if err != nil || len(ips) == 0 {
		t.Fatalf("InstanceIPs() = %v, %v", ips, err)
	}
	for _, ip := range ips {
		if ip.IsLoopback() && len(ips) > 1 || ip.IsLinkLocalUnicast() {
			t.Errorf("%s is no address that others reach", ip)
		}
	}
}

// R4: a client cannot make series: with two nameservers there are at most 120, whatever it asks and whatever they answer.
func TestSeries(t *testing.T) {
	t.Parallel()
	control := fakexds.Start(t, fakexds.Options{})
	control.Push(webTable())
	answer := func(query *dns.Msg, _ string) *dns.Msg {
		var rcode int
		_, _ = fmt.Sscanf(query.Question[0].Name, "r%d.", &rcode)
		return new(dns.Msg).SetRcode(query, rcode)
	}
	cfg := config(t, control.Addr())
	cfg.DNS.Forward.Upstreams = nil
	for range 2 {
		cfg.DNS.Forward.Upstreams = append(cfg.DNS.Forward.Upstreams, upstream.Spec{Addr: fakedns.Start(t, answer).Addr})
	}
	a := start(t, cfg)
	a.await(t, true)
	types := []uint16{dns.TypeA, dns.TypeAAAA, dns.TypePTR, dns.TypeSRV, dns.TypeTXT, dns.TypeMX, dns.TypeNS, dns.TypeSOA, dns.TypeHTTPS, dns.TypeANY, 65280}
	for _, l := range a.Proxy().Addrs() {
		client := dns.Client{Net: l.Network}
		for i := range 48 {
			for _, opcode := range []int{dns.OpcodeQuery, dns.OpcodeNotify} {
				for _, name := range []string{fmt.Sprintf("r%d.name%d.example.", i%16, i/8), "host-0.shop.svc.cluster.local.", "absent.shop.svc.cluster.local.", "version.server."} {
					query := new(dns.Msg).SetQuestion(name, types[i%len(types)])
					query.Opcode = opcode
					if name == "version.server." {
						query.Question[0].Qclass = dns.ClassCHAOS
					}
					_, _, _ = client.Exchange(query, l.Address) // the answer does not matter
				}
			}
		}
	}
	_, text := a.get(t, "/metrics")
	const queries, most = "nametap_dns_queries_total{", 20 // combinations of source and response code
	own, counters := 0, 0
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "nametap_") || strings.HasPrefix(line, "istio_") {
			own++
		}
		if strings.HasPrefix(line, queries) {
			counters++
		}
	}
	if total := own - counters + most; counters < 8 || counters > most || total > 120 {
		t.Errorf("%d series, %d of them count queries; with all of these %d:\n%s", own, counters, total, text)
	}
}
