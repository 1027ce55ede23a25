package dnsproxy

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// The kinds of answers from the table, with a question for each.
var ownQuestions = []struct {
	kind, name string
	qtype      uint16
}{
	{"direct", "web-1.shop-1.svc.cluster.local.", dns.TypeA},
	{"shortname", "web-1.shop-1.", dns.TypeA},
	{"autopath", "api-10.example.com.shop-1.svc.cluster.local.", dns.TypeA},
	{"wildcard", "x.wild.example.com.", dns.TypeA},
	{"external", "api-20.example.com.", dns.TypeA},
	{"nodata", "web-1.shop-1.svc.cluster.local.", dns.TypeAAAA},
	{"ptr", "1.0.0.10.in-addr.arpa.", dns.TypePTR},
	{"alias", "old.shop-1.svc.cluster.local.", dns.TypeA},
	{"endpoint", "2001-db8--1.peers.shop-1.svc.cluster.local.", dns.TypeAAAA},
	{"endpoint ptr", "1.0.16.172.in-addr.arpa.", dns.TypePTR},
	{"port", "_http._tcp.vip.shop-1.svc.cluster.local.", dns.TypeSRV},
	{"endpoint port", "_http._tcp.peers.shop-1.", dns.TypeSRV},
}

// A world is a server without listeners, and a task for its fast path.
type world struct {
	server *Server
	task   *task
}

// newWorld makes a server with a search list.
func newWorld(tb testing.TB, cfg Config, search []string) *world {
	tb.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.Forward.ResolvConf = filepath.Join(tb.TempDir(), "resolv.conf")
	if err := os.WriteFile(cfg.Forward.ResolvConf, []byte("search "+strings.Join(search, " ")+"\n"), 0o600); err != nil {
		tb.Fatal(err)
	}
	server, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return &world{server, new(task)}
}

// loadServer gives the server a table.
func (w *world) loadServer(tb testing.TB, table map[string]*api.NameTable_NameInfo) {
	tb.Helper()
	wire, err := proto.Marshal(&api.NameTable{Table: table})
	if err != nil {
		tb.Fatal(err)
	}
	shards, err := digest.Split(wire)
	if err != nil {
		tb.Fatal(err)
	}
	if err := w.server.Load(shards); err != nil {
		tb.Fatal(err)
	}
}

// newBenchHandler returns a handler with nameservers and a table of n hosts, as a pod in
// the namespace shop-1 has.
func newBenchHandler(tb testing.TB, n int, nameservers ...upstream.Spec) *front {
	tb.Helper()
	table := map[string]*api.NameTable_NameInfo{
		"*.wild.example.com": {Ips: []string{"192.0.2.1"}, Registry: "External"},
		"old.shop-1.svc.cluster.local": {
			Ips: []string{"192.0.2.2"}, Registry: "Kubernetes", Shortname: "old", Namespace: "shop-1", Alias: "db.example.com",
		},
		"peers.shop-1.svc.cluster.local": {
			Ips: []string{"172.16.0.1", "172.16.0.2", "2001:db8::1"}, Registry: "Kubernetes", Shortname: "peers", Namespace: "shop-1",
			Headless: true, Ports: []*api.NameTable_Port{{Name: "http", Number: 8080}, {Name: "https", Number: 8443}},
		},
		"peers-0.peers.shop-1.svc.cluster.local": {
			Ips: []string{"172.16.0.2"}, Registry: "Kubernetes", Shortname: "peers-0.peers", Namespace: "shop-1",
		},
		"vip.shop-1.svc.cluster.local": {
			Ips: []string{"172.16.1.1"}, Registry: "Kubernetes", Shortname: "vip", Namespace: "shop-1",
			Ports: []*api.NameTable_Port{{Name: "http", Number: 80}, {Name: "https", Number: 443}},
		},
	}
	for i := range n {
		ip := fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)
		if i%10 == 0 {
			table[fmt.Sprintf("api-%d.example.com", i)] = &api.NameTable_NameInfo{Ips: []string{ip}, Registry: "External"}
			continue
		}
		name, namespace := fmt.Sprintf("web-%d", i), fmt.Sprintf("shop-%d", i%100)
		table[name+"."+namespace+".svc.cluster.local"] = &api.NameTable_NameInfo{
			Ips: []string{ip}, Registry: "Kubernetes", Shortname: name, Namespace: namespace,
		}
	}
	search := []string{"shop-1.svc.cluster.local", "svc.cluster.local", "cluster.local"}
	w := newWorld(tb, Config{Namespace: "shop-1", Forward: forward.Config{Upstreams: nameservers}}, search)
	w.loadServer(tb, table)
	return &w.server.handler
}

// packedQuestion returns a query with EDNS for a question.
func packedQuestion(tb testing.TB, name string, qtype uint16) []byte {
	tb.Helper()
	return packed(tb, new(dns.Msg).SetQuestion(name, qtype).SetEdns0(1232, false))
}

// Answers from the table do not allocate, over either transport, while a reader reads failures (R21).
func TestOwnNamesAllocateNothing(t *testing.T) {
	h, task := newBenchHandler(t, 100), new(task)
	defer h.seen.ReadOwn(seen.Failures()).Close()
	out := make([]byte, 0, dns.MaxMsgSize)
	for _, q := range ownQuestions {
		packet := packedQuestion(t, q.name, q.qtype)
		for _, over := range []transport{overUDP, overTCP} {
			from := &arrival{protocol: over, client: noClient}
			allocs := testing.AllocsPerRun(100, func() {
				task.begin(packet, from)
				if _, verdict := h.answerFast(out, task); verdict != answered {
					t.Fatalf("%s is passed on", q.kind)
				}
			})
			if allocs != 0 {
				t.Errorf("%s over %s: %v allocations", q.kind, over, allocs)
			}
		}
	}
}

// guardedQuestions are questions that a guard answers. Its policy has n rules, and is in use in h.
func guardedQuestions(tb testing.TB, h *front, n int) map[string][]byte {
	tb.Helper()
	text := &strings.Builder{}
	text.WriteString("deny:\n- names: [bad.example.net]\nallow:\n- names: [\"*.pkg.example.net\"]\n")
	for i := range n {
		fmt.Fprintf(text, "- names: [api-%d.example.net, \"*.zone-%d.example.net\"]\n  ports: [443]\n", i, i)
	}
	policy, err := guard.Parse("/etc/nametap/guard.yaml", []byte(text.String()))
	if err != nil {
		tb.Fatal(err)
	}
	used := *h.inUse.Load()
	used.guard = guard.New("key")
	used.guard.Use(policy)
	h.inUse.Store(&used)
	return map[string][]byte{
		"denied":         packedQuestion(tb, "secret.attacker.example.org.", dns.TypeA),
		"denied by rule": packedQuestion(tb, "bad.example.net.", dns.TypeTXT),
		"exact":          packedQuestion(tb, "api-0.example.net.", dns.TypeA),
		"below":          packedQuestion(tb, "x.pkg.example.net.", dns.TypeAAAA),
		"another type":   packedQuestion(tb, "api-0.example.net.", dns.TypeHTTPS),
	}
}

// Answers of the guard do not allocate.
func TestGuardAllocatesNothing(t *testing.T) { // G3, G4
	h, task := newBenchHandler(t, 100), new(task)
	out := make([]byte, 0, dns.MaxMsgSize)
	for kind, packet := range guardedQuestions(t, h, 10) {
		for _, over := range []transport{overUDP, overTCP} {
			from := &arrival{protocol: over, client: noClient}
			if allocs := testing.AllocsPerRun(100, func() {
				task.begin(packet, from)
				if _, verdict := h.answerFast(out, task); verdict != answered {
					t.Fatalf("%s is passed on", kind)
				}
			}); allocs != 0 {
				t.Errorf("%s over %s: %v allocations", kind, over, allocs)
			}
		}
	}
}

// BenchmarkRespondGuarded is BenchmarkRespond for answers of the guard, with few and many rules.
func BenchmarkRespondGuarded(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		h, task := newBenchHandler(b, 10_000), new(task)
		from := &arrival{protocol: overUDP, client: noClient}
		out := make([]byte, 0, dns.MaxMsgSize)
		for kind, packet := range guardedQuestions(b, h, n) {
			b.Run(fmt.Sprintf("%s/%d", kind, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					task.begin(packet, from)
					if _, verdict := h.answerFast(out, task); verdict != answered {
						b.Fatal("passed on")
					}
				}
			})
		}
	}
}

// newForwardingHandler returns a handler whose nameserver knows www.example.
func newForwardingHandler(tb testing.TB) *front {
	tb.Helper()
	fake := fakedns.Start(tb, fakedns.Answer("www.example. 300 IN A 192.0.2.1"))
	h := newBenchHandler(tb, 100, upstream.Spec{Addr: fake.Addr})
	ctx, cancel := context.WithCancel(tb.Context())
	ended := make(chan error)
	go func() { ended <- h.forwarder.Run(ctx) }()
	tb.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			tb.Error(err)
		}
	})
	return h
}

// Answers from the cache do not allocate.
func TestCacheHitsAllocateNothing(t *testing.T) { // F8
	h := newForwardingHandler(t)
	task := new(task)
	out := make([]byte, 0, dns.MaxMsgSize)
	for _, edns := range []bool{false, true} {
		msg := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
		if edns {
			msg.SetEdns0(1232, true)
		}
		packet := packed(t, msg)
		task.begin(packet, &arrival{protocol: overUDP, client: noClient})
		if _, verdict := h.answerFast(out, task); verdict != deferred {
			t.Fatal("it was in the cache already")
		}
		if resp := task.handler.answerSlow(task); reply.Rcode(resp) != dns.RcodeSuccess {
			t.Fatalf("not forwarded: % x", resp)
		}
		for _, over := range []transport{overUDP, overTCP} {
			from := &arrival{protocol: over, client: noClient}
			allocs := testing.AllocsPerRun(100, func() {
				task.begin(packet, from)
				if _, verdict := h.answerFast(out, task); verdict != answered {
					t.Fatal("passed on")
				}
			})
			if allocs != 0 {
				t.Errorf("EDNS %v, over %s: %v allocations", edns, over, allocs)
			}
		}
	}
}

func packed(tb testing.TB, msg *dns.Msg) []byte {
	tb.Helper()
	packet, err := msg.Pack()
	if err != nil {
		tb.Fatal(err)
	}
	return packet
}

// BenchmarkRespond measures a query on the fast path without the kernel's part.
func BenchmarkRespond(b *testing.B) {
	h := newBenchHandler(b, 10_000)
	task := new(task)
	from := &arrival{protocol: overUDP, client: noClient}
	out := make([]byte, 0, dns.MaxMsgSize)
	for _, q := range ownQuestions {
		b.Run(q.kind, func(b *testing.B) {
			packet := packedQuestion(b, q.name, q.qtype)
			b.ReportAllocs()
			for b.Loop() {
				task.begin(packet, from)
				if _, verdict := h.answerFast(out, task); verdict != answered {
					b.Fatal("passed on")
				}
			}
		})
	}
}

// noClient is for an arrival without a client.
func noClient() netip.AddrPort { return netip.AddrPort{} }
