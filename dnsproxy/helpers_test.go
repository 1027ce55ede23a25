// Most of these tests run in a bubble of testing/synctest. Time stands still there while a proxy or a nameserver runs,
// because a goroutine that waits for a socket may be woken from outside. So no timer of the proxy fires, however slow the
// machine is: no nameserver is late, no query is sent twice, nothing expires. Without open sockets (serve), time passes as
// usual in a bubble. A test that needs late nameservers uses real time, and does not say how long something takes.

package dnsproxy_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// until waits until the condition is true, also where time stands still. event says what the test waits for. The limit
// counts pauses and not time, because the machine may stand still.
func until(tb testing.TB, event string, condition func() bool) {
	tb.Helper()
	const pauses = 120_000
	for range pauses {
		if condition() {
			return
		}
		_ = unix.Nanosleep(&unix.Timespec{Nsec: 1e6}, nil) // it may be shorter
	}
	tb.Fatalf("timed out waiting: %s", event)
}

// hosts are the entries of a NameTable.
type hosts map[string]*api.NameTable_NameInfo

// wire returns the NameTable in wire form.
func (h hosts) wire(tb testing.TB) []byte {
	tb.Helper()
	wire, err := proto.Marshal(&api.NameTable{Table: h})
	if err != nil {
		tb.Fatal(err)
	}
	return wire
}

// split returns the entries of tables by shard. It returns all shards, also those without entries.
func split(tb testing.TB, tables ...[]byte) map[int][]byte {
	tb.Helper()
	shards, err := digest.Split(slices.Concat(tables...))
	if err != nil {
		tb.Fatal(err)
	}
	for i := range digest.Count {
		if shards[i] == nil {
			shards[i] = []byte{}
		}
	}
	return shards
}

// service is the entry of a Kubernetes Service.
func service(shortname, namespace string, ips ...string) *api.NameTable_NameInfo {
	return &api.NameTable_NameInfo{Registry: "Kubernetes", Shortname: shortname, Namespace: namespace, Ips: ips}
}

// external is the entry of a ServiceEntry.
func external(ips ...string) *api.NameTable_NameInfo {
	return &api.NameTable_NameInfo{Registry: "External", Ips: ips}
}

// addrs returns n addresses of 10.net.0.0/16.
func addrs(network, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("10.%d.%d.%d", network, i/250, i%250+1)
	}
	return out
}

// A proxy is a Server that runs until its test ends.
type proxy struct {
	*dnsproxy.Server
	metrics *prometheus.Registry
	ended   <-chan error // what Run returned
}

// start runs a server for cfg; by default on a free port of 127.0.0.1, with namespace shop,
// without resolv.conf and log. A query may take an hour.
func start(tb testing.TB, cfg dnsproxy.Config) *proxy {
	tb.Helper()
	return startIn(tb.Context(), tb, cfg)
}

func startIn(ctx context.Context, tb testing.TB, cfg dnsproxy.Config) *proxy {
	tb.Helper()
	p := newProxy(tb, cfg)
	ended := make(chan error, 1)
	p.ended = ended
	returned := make(chan struct{})
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(returned)
		ended <- p.Run(ctx)
	}()
	tb.Cleanup(func() {
		p.EndForwarding()
		cancel()
		<-returned
	})
	select {
	case <-p.Ready():
	case err := <-ended:
		tb.Fatalf("Run returned %v before the listeners were open", err)
	}
	return p
}

// newProxy is like start, without Run.
func newProxy(tb testing.TB, cfg dnsproxy.Config) *proxy {
	tb.Helper()
	p := &proxy{metrics: prometheus.NewRegistry()}
	if cfg.Addr == "" {
		cfg.Addr = "127.0.0.1:0"
	}
	if cfg.Namespace == "" {
		cfg.Namespace = "shop"
	}
	if cfg.Forward.ResolvConf == "" {
		cfg.Forward.ResolvConf = resolvConf(tb)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Forward.Timeout == 0 {
		cfg.Forward.Timeout = time.Hour
	}
	cfg.Registerer = p.metrics
	server, err := dnsproxy.New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	p.Server = server
	return p
}

// load loads a push of one NameTable.
func (p *proxy) load(tb testing.TB, h hosts) {
	tb.Helper()
	if err := p.Load(split(tb, h.wire(tb))); err != nil {
		tb.Fatal(err)
	}
}

// addr returns the address of the first listener of a network.
func (p *proxy) addr(network string) string {
	for _, a := range p.Addrs() {
		if a.Network == network {
			return a.Address
		}
	}
	return ""
}

// count returns the value of a counter or gauge without labels.
func (p *proxy) count(tb testing.TB, name string) float64 {
	tb.Helper()
	families, err := p.metrics.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() == name {
			m := family.GetMetric()[0]
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	tb.Fatalf("no metric %s", name)
	return 0
}

// bySource returns the number of queries answered from a source.
func (p *proxy) bySource(tb testing.TB, source string) float64 {
	tb.Helper()
	return p.sum(tb, "nametap_dns_queries_total", "source", source)
}

// sum returns the sum of a metric's counters that have labels, which are names and values in turn.
func (p *proxy) sum(tb testing.TB, name string, labels ...string) float64 {
	tb.Helper()
	families, err := p.metrics.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	sum := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			found := 0
			for _, l := range m.GetLabel() {
				for label := range slices.Chunk(labels, 2) {
					if l.GetName() == label[0] && l.GetValue() == label[1] {
						found += 2
					}
				}
			}
			if found == len(labels) {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// await waits until a metric has a value.
func (p *proxy) await(tb testing.TB, name string, want float64) {
	tb.Helper()
	until(tb, fmt.Sprintf("%s = %v", name, want), func() bool { return p.count(tb, name) == want })
}

// wantAsked fails the test unless nameservers have received n queries since their start or reset.
func wantAsked(tb testing.TB, n int, fakes ...*fakedns.Server) {
	tb.Helper()
	var asked []fakedns.Query
	for _, fake := range fakes {
		asked = append(asked, fake.Queries()...)
	}
	if len(asked) != n {
		tb.Errorf("asked %v, want %d queries", asked, n)
	}
}

// resolvConf writes a resolv.conf and returns its path.
func resolvConf(tb testing.TB, lines ...string) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		tb.Fatal(err)
	}
	return path
}

// nameserver starts a fake nameserver that is closed when the test ends.
func nameserver(tb testing.TB, handler fakedns.Handler) *fakedns.Server {
	tb.Helper()
	return fakedns.Start(tb, handler)
}

// servers returns the addresses of fake nameservers.
func servers(fakes ...*fakedns.Server) []upstream.Spec {
	out := make([]upstream.Spec, len(fakes))
	for i, fake := range fakes {
		out[i].Addr = fake.Addr
	}
	return out
}

// question makes a query without EDNS.
func question(name string, qtype uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype)
}

// withEDNS adds an OPT record to a query.
func withEDNS(req *dns.Msg, size uint16) *dns.Msg { return req.SetEdns0(size, false) }

// ask sends a query over UDP, without EDNS.
func (p *proxy) ask(tb testing.TB, name string, qtype uint16) *dns.Msg {
	tb.Helper()
	return p.exchange(tb, "udp", question(name, qtype))
}

// exchange sends a query and returns the response to it.
func (p *proxy) exchange(tb testing.TB, network string, req *dns.Msg) *dns.Msg {
	tb.Helper()
	return exchange(tb, network, p.addr(network), req)
}

func exchange(tb testing.TB, network, address string, req *dns.Msg) *dns.Msg {
	tb.Helper()
	packet, err := req.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	resp := parse(tb, send(tb, network, address, packet))
	if resp.Id != req.Id || !resp.Response {
		tb.Fatalf("the response to query %d is\n%v", req.Id, resp)
	}
	return resp
}

// serve is exchange without sockets, for a bubble in which time passes.
func (p *proxy) serve(tb testing.TB, network string, req *dns.Msg) *dns.Msg {
	tb.Helper()
	packet, err := req.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return parse(tb, p.Serve(network, packet))
}

// send sends a packet and returns the reply.
func (p *proxy) send(tb testing.TB, network string, packet []byte) []byte {
	tb.Helper()
	return send(tb, network, p.addr(network), packet)
}

func send(tb testing.TB, network, address string, packet []byte) []byte {
	tb.Helper()
	conn := dial(tb, network, address)
	defer conn.Close()
	write(tb, conn, packet)
	return read(tb, conn)
}

// dial connects to a listener.
func (p *proxy) dial(tb testing.TB, network string) net.Conn {
	tb.Helper()
	return dial(tb, network, p.addr(network))
}

func dial(tb testing.TB, network, address string) net.Conn {
	tb.Helper()
	conn, err := net.Dial(network, address)
	if err != nil {
		tb.Fatal(err)
	}
	return conn
}

// write sends a message, over TCP with its length prefix.
func write(tb testing.TB, conn net.Conn, packet []byte) {
	tb.Helper()
	if _, err := (&dns.Conn{Conn: conn}).Write(packet); err != nil {
		tb.Fatal(err)
	}
}

// read reads a message.
func read(tb testing.TB, conn net.Conn) []byte {
	tb.Helper()
	packet := make([]byte, dns.MaxMsgSize)
	n, err := (&dns.Conn{Conn: conn}).Read(packet)
	if err != nil {
		tb.Fatal(err)
	}
	return packet[:n]
}

func parse(tb testing.TB, packet []byte) *dns.Msg {
	tb.Helper()
	msg := new(dns.Msg)
	if err := msg.Unpack(packet); err != nil {
		tb.Fatalf("the response cannot be parsed: %v\n% x", err, packet)
	}
	return msg
}

// forwarded is the outcome of a query forwarded to a nameserver that answers NXDOMAIN to
// everything.
const forwarded = "NXDOMAIN"

// webAddress is the outcome of a query for the short name web.
const webAddress = "web. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"

// outcome formats a response in one line: "OWNER TYPE DATA; …" with the addresses sorted,
// the CNAME first; "NODATA OWNER" with the SOA's owner, after a CNAME if there is one; or
// the response code.
func outcome(resp *dns.Msg) string {
	if resp.Rcode != dns.RcodeSuccess {
		return dns.RcodeToString[resp.Rcode]
	}
	var cnames, others []string
	for _, rr := range resp.Answer {
		line := record(rr)
		if rr.Header().Rrtype == dns.TypeCNAME {
			cnames = append(cnames, line)
		} else {
			others = append(others, line)
		}
	}
	slices.Sort(others)
	if len(others) == 0 {
		others = []string{"NODATA"}
		for _, rr := range resp.Ns {
			others[0] += " " + rr.Header().Name
		}
	}
	return strings.Join(append(cnames, others...), "; ")
}

// record formats a record without class and TTL.
func record(rr dns.RR) string {
	h := rr.Header()
	return fmt.Sprintf("%s %s %s", h.Name, dns.TypeToString[h.Rrtype], strings.TrimPrefix(rr.String(), h.String()))
}

// A dialogue is a question, "NAME TYPE", and its expected outcome.
type dialogue struct{ ask, want string }

// converse sends the questions over UDP and compares the outcomes.
func (p *proxy) converse(t *testing.T, dialogues []dialogue) {
	t.Helper()
	for _, d := range dialogues {
		name, qtype, _ := strings.Cut(d.ask, " ")
		got := outcome(p.ask(t, name, dns.StringToType[qtype]))
		if got != d.want {
			t.Errorf("%s\n got %s\nwant %s", d.ask, got, d.want)
		}
	}
}

// ede returns the Extended DNS Error of a response, nil without one.
func ede(resp *dns.Msg) *dns.EDNS0_EDE {
	if opt := resp.IsEdns0(); opt != nil {
		for _, option := range opt.Option {
			if e, ok := option.(*dns.EDNS0_EDE); ok {
				return e
			}
		}
	}
	return nil
}

// explain explains a question, "NAME TYPE".
func explain(tb testing.TB, p *proxy, ask string) dnsproxy.Explanation {
	tb.Helper()
	name, qtype, _ := strings.Cut(ask, " ")
	e, err := p.Explain(name, qtype)
	if err != nil {
		tb.Fatal(err)
	}
	return e
}

// newLog returns a logger and the buffer it writes to.
func newLog() (*slog.Logger, *testlog.Buffer) {
	log := new(testlog.Buffer)
	return log.Logger(), log
}
