package dnsproxy

import (
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
)

// firstSeed selects other tables and queries for the differential test:
// go test ./dnsproxy -run Differential -differential.seed 12345.
var firstSeed = flag.Uint64("differential.seed", 0, "first seed of the differential test's tables")

// The extent of the differential test, and the part of the queries for the race detector,
// which makes the test ten times slower.
const (
	differentialTables  = 100
	differentialQueries = 1100 // for each table
	differentialRace    = 10
)

// underRace reports whether the race detector is in the test binary.
func underRace() bool {
	info, _ := debug.ReadBuildInfo()
	return info != nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// A world is a server and its reference, with the same table.
type world struct {
	server    *Server
	task      *task
	reference *reference
	seen      tally
}

// A tally counts the kinds of queries, so that the test can check that there was each kind.
type tally map[string]int

func newWorld(tb testing.TB, cfg Config, search []string) *world {
	tb.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.Forward.ResolvConf = filepath.Join(tb.TempDir(), "resolv.conf")
	line := "search " + strings.Join(search, " ") + "\n"
	if err := os.WriteFile(cfg.Forward.ResolvConf, []byte(line), 0o600); err != nil {
		tb.Fatal(err)
	}
	server, err := New(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return &world{
		server: server, task: new(task), reference: newReference(cfg, search), seen: tally{},
	}
}

// load gives both the same table.
func (w *world) load(tb testing.TB, table map[string]*api.NameTable_NameInfo) {
	tb.Helper()
	w.loadServer(tb, table)
	w.reference.load(table)
}

// loadServer gives the server a table, in one NameTable or two.
func (w *world) loadServer(tb testing.TB, table map[string]*api.NameTable_NameInfo) {
	tb.Helper()
	halves := []*api.NameTable{{Table: map[string]*api.NameTable_NameInfo{}}, {Table: map[string]*api.NameTable_NameInfo{}}}
	for key, info := range table {
		halves[len(key)%2].Table[key] = info
	}
	push := make([][]byte, len(halves))
	for i, half := range halves {
		wire, err := proto.Marshal(half)
		if err != nil {
			tb.Fatal(err)
		}
		push[i] = wire
	}
	shards, err := digest.Split(push...)
	if err != nil {
		tb.Fatal(err)
	}
	if err := w.server.Load(shards); err != nil {
		tb.Fatal(err)
	}
}

// change gives both another table, the server in changes of a few shards each or, at times, in one of all shards.
func (w *world) change(tb testing.TB, r *rand.Rand, before, table map[string]*api.NameTable_NameInfo) {
	tb.Helper()
	shards := map[int][]byte{}
	for key := range before {
		shards[digest.ShardOf(key)] = nil // may have no host any more
	}
	for key, info := range table {
		entry, err := proto.Marshal(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{key: info}})
		if err != nil {
			tb.Fatal(err)
		}
		at := digest.ShardOf(key)
		shards[at] = append(shards[at], entry...)
	}
	whole := r.IntN(4) == 0
	for len(shards) > 0 {
		some, want := map[int][]byte{}, 1+r.IntN(20)
		for at, entries := range shards {
			if whole || len(some) < want {
				some[at] = entries
				delete(shards, at)
			}
		}
		if err := w.server.Load(some); err != nil {
			tb.Fatal(err)
		}
	}
	w.reference.load(table)
}

// compare lets both answer a packet and reports how they differ.
func (w *world) compare(packet []byte, over transport) error {
	const before = "what the buffer held before"
	asked := bytes.Clone(packet)
	out, ok := w.fast([]byte(before), packet, over)
	if !bytes.Equal(asked, packet) || !bytes.HasPrefix(out, []byte(before)) {
		return fmt.Errorf("the query was written to, or the buffer's content: % x, %q", packet, out)
	}
	got := out[len(before):]
	q := parseRef(packet)
	var want *dns.Msg
	outside := "" // asked first
	if q.demand != mustHandOn {
		want, outside = w.reference.answer(&q)
		if w.reference.specialHere(strings.ToLower(q.name)) && q.qtype != dns.TypeAXFR && q.qtype != dns.TypeIXFR {
			want = w.reference.selfAnswer(&q)
		}
	}
	switch {
	case !ok && len(got) > 0:
		return fmt.Errorf("passed on, with %d bytes in the buffer", len(got))
	case ok && outside != "":
		return fmt.Errorf("answered; want it passed on, and then\n%v", want)
	case !ok && outside != "":
		w.seen["outside"]++
		return w.compareServed(&q, want, over)
	case !ok && want != nil && q.demand == mustAnswer:
		return fmt.Errorf("passed on; want\n%v", want)
	case !ok:
		w.seen["passed on"]++
		return w.compareServed(&q, w.reference.selfAnswer(&q), over)
	case want == nil:
		// Not from the table, but without nameservers: a local-only name.
		if want = w.reference.selfAnswer(&q); want == nil || q.demand == mustHandOn {
			return fmt.Errorf("answered; want it passed on:\n%s", printable(got))
		}
		w.seen["self"]++
	}
	limit := w.reference.limit(&q, over)
	if err := w.compareResponse(got, &q, want, limit); err != nil {
		return fmt.Errorf("%w\nlimit: %d bytes\ngot %d bytes\n%s\nwant, in any order\n%v", err, limit, len(got), printable(got), want)
	}
	return nil
}

// fast is the fast path for one query. It reports whether the query was answered.
func (w *world) fast(dst, packet []byte, over transport) (response []byte, ok bool) {
	w.task.begin(packet, &arrival{protocol: over, client: noClient})
	response, verdict := w.server.handler.answerFast(dst, w.task)
	return response, verdict == answered
}

// compareServed compares the results for a query that was passed to a worker: nametap answers it itself or, if want is
// nil, fails to forward it, because there are no nameservers.
func (w *world) compareServed(q *refQuery, want *dns.Msg, over transport) error {
	if q.demand != mustAnswer {
		return nil
	}
	if want == nil && w.seen["passed on"]%8 != 0 { // there are many and they are alike
		return nil
	}
	got := w.task.handler.answerSlow(w.task)
	if want == nil {
		if rcode := got[3] & 0xF; rcode != dns.RcodeServerFailure {
			return fmt.Errorf("not forwarded:\n%s", printable(got))
		}
		return nil
	}
	w.seen["self"]++
	if err := w.compareResponse(got, q, want, w.reference.limit(q, over)); err != nil {
		return fmt.Errorf("%w\ngot %d bytes\n%s\nwant\n%v", err, len(got), printable(got), want)
	}
	return nil
}

// printable returns a response as text.
func printable(packet []byte) string {
	msg := new(dns.Msg)
	if err := msg.Unpack(packet); err != nil {
		return fmt.Sprintf("%v: % x", err, packet)
	}
	return msg.String()
}

// compareResponse compares a response with the untruncated one, of which it has what fits
// in limit.
func (w *world) compareResponse(packet []byte, q *refQuery, want *dns.Msg, limit int) error {
	if isServices(want) {
		w.count(want, refMessageLen(q, want.Answer...) > limit)
		return compareServices(packet, q, want, limit)
	}
	answers, authority := refCut(q, want, limit)
	got := new(dns.Msg)
	if err := got.Unpack(packet); err != nil {
		return err
	}
	hdr := want.MsgHdr
	left := answers < len(want.Answer) || authority < len(want.Ns)
	hdr.Truncated = left && limit < dns.MaxMsgSize // over TCP a client could do nothing about it
	switch {
	case len(packet) > limit:
		return fmt.Errorf("%d bytes are too many", len(packet))
	case got.MsgHdr != hdr:
		return fmt.Errorf("header %+v, want %+v", got.MsgHdr, hdr)
	case !bytes.HasPrefix(packet[12:], q.question) || binary.BigEndian.Uint16(packet[4:]) != 1:
		return fmt.Errorf("question % x, want % x", packet[12:], q.question)
	case len(got.Answer) != answers || len(got.Ns) != authority || len(got.Extra) != len(want.Extra):
		return fmt.Errorf("%d answers, %d authority, %d additional; want %d, %d, %d",
			len(got.Answer), len(got.Ns), len(got.Extra), answers, authority, len(want.Extra))
	}
	end := refQuery{end: 12 + len(q.question)}
	for range answers + authority + len(want.Extra) {
		if _, _, ok := end.skipRecord(packet); !ok {
			return fmt.Errorf("at %d there is no record", end.end)
		}
	}
	if end.end != len(packet) {
		return fmt.Errorf("bytes after the message: % x", packet[end.end:])
	}
	w.count(want, left)
	return compareRecords(got, want)
}

// compareRecords compares responses with the right number of records.
func compareRecords(got, want *dns.Msg) error {
	whole := map[string]int{} // addresses of the whole response
	counts := map[uint16]int{}
	for _, rr := range want.Answer {
		if isAddress(rr) {
			whole[recordKey(rr)]++
		}
	}
	for i, rr := range got.Answer {
		// The response has as many records of every type as fit.
		counts[want.Answer[i].Header().Rrtype]++
		counts[rr.Header().Rrtype]--
		switch key := recordKey(rr); {
		case !isAddress(rr) && key != recordKey(want.Answer[i]):
			return fmt.Errorf("answer %d: %v, want %v", i, rr, want.Answer[i])
		case isAddress(rr) && whole[key] == 0:
			return fmt.Errorf("answer %d: %v is too many", i, rr)
		default:
			whole[key]--
		}
	}
	for rrtype, missing := range counts {
		if missing != 0 {
			return fmt.Errorf("type %s: %d are missing", dns.TypeToString[rrtype], missing)
		}
	}
	for i, rr := range slices.Concat(got.Ns, got.Extra) {
		if expected := slices.Concat(want.Ns[:len(got.Ns)], want.Extra)[i]; recordKey(rr) != recordKey(expected) {
			return fmt.Errorf("got %v, want %v", rr, expected)
		}
	}
	return nil
}

func isAddress(rr dns.RR) bool {
	return rr.Header().Rrtype == dns.TypeA || rr.Header().Rrtype == dns.TypeAAAA
}

// recordKey returns the same key for equal records; names are compared byte by byte.
func recordKey(rr dns.RR) string {
	h := rr.Header()
	data := ""
	switch rr := rr.(type) {
	case *dns.A:
		data = string(rr.A.To4())
	case *dns.AAAA:
		data = string(rr.AAAA.To16())
	default:
		data = rr.String()
	}
	const escape = "\x00"
	return h.Name + escape + string(binary.BigEndian.AppendUint32(
		binary.BigEndian.AppendUint32(nil, uint32(h.Rrtype)<<16|uint32(h.Class)), h.Ttl)) + data
}

// count counts the kind of an answer.
func (w *world) count(resp *dns.Msg, truncated bool) {
	kind := "addresses"
	switch {
	case len(resp.Ns) > 0:
		kind = "nodata"
	case len(resp.Answer) == 0:
		kind = "refused"
	case resp.Answer[len(resp.Answer)-1].Header().Rrtype == dns.TypePTR:
		kind = "pointers"
	case isServices(resp):
		kind = "services"
	}
	w.seen[kind]++
	if len(resp.Answer) > 0 && resp.Answer[0].Header().Rrtype == dns.TypeCNAME {
		w.seen["autopath"]++
	}
	if name, rest, _ := strings.Cut(resp.Question[0].Name, "."); len(resp.Answer) == 1 && isAddress(resp.Answer[0]) && strings.Contains(name, "-") && rest != "" {
		w.seen["endpoints"]++
	}
	if len(resp.Answer) > 1 && resp.Answer[1].Header().Rrtype == dns.TypeCNAME {
		w.seen["autopath of alias"]++
	}
	if truncated {
		w.seen["truncated "+kind]++
	}
}

// The fast path answers as the reference does, for random tables and queries. Half of the tables came as changes
// of the one before.
func TestDifferential(t *testing.T) { // N1-N11, A1-A6, A8, A9, C11
	t.Parallel()
	tables, queries := differentialTables, differentialQueries
	if underRace() { // `make coverage` runs all of them, without the race detector
		tables, queries = tables/4, queries/differentialRace
	}
	var mu sync.Mutex
	seen := tally{}
	t.Run("tables", func(t *testing.T) {
		for seed := *firstSeed; seed < *firstSeed+uint64(tables); seed++ {
			t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
				t.Parallel()
				g := newGenerator(seed)
				w := newWorld(t, g.config, g.search)
				table := g.table()
				before := g.before(table)
				w.load(t, before)
				if seed%2 == 0 {
					w.load(t, table)
				} else {
					w.change(t, rand.New(rand.NewPCG(seed, 1)), before, table)
				}
				for i := range queries {
					packet, over := g.query(w.reference)
					if err := w.compare(packet, over); err != nil {
						t.Fatalf("query %d over %s: % x\n%s\n%v\nreplay: -run 'TestDifferential/tables/seed=%d$' -differential.seed %d",
							i, over, packet, printable(packet), err, seed, *firstSeed)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				seen["tables"]++
				for kind, n := range w.seen {
					seen[kind] += n
				}
			})
		}
	})
	t.Log(seen)
	for _, kind := range []string{
		"passed on", "self", "outside", "addresses", "nodata", "pointers", "autopath", "autopath of alias", "endpoints", "services", "truncated services",
		"truncated addresses", "truncated nodata", "truncated pointers",
	} {
		if all := queries * tables; seen["tables"] == tables && seen[kind] < all/20_000 {
			t.Errorf("%s: only %d of %d queries", kind, seen[kind], all)
		}
	}
}

// A response of 65,535 bytes is complete over TCP; of a longer one there is a sample, without TC.
func TestReferenceLargest(t *testing.T) { // A9
	t.Parallel()
	cfg := Config{TTL: time.Second, EDNSUDPSize: 65534, Domain: "cluster.local"}
	w := newWorld(t, cfg, nil)
	ips := make([]string, 4093)
	for i := range ips {
		ips[i] = fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)
	}
	w.load(t, map[string]*api.NameTable_NameInfo{"*.e": {Ips: ips}})
	for n := range 34 {
		req := new(dns.Msg).SetQuestion(strings.Repeat("x", n+1)+".e.", dns.TypeA)
		for _, size := range []uint16{0, 65534} {
			if size > 0 {
				req.SetEdns0(size, false)
			}
			packet, err := req.Pack()
			if err != nil {
				t.Fatal(err)
			}
			for _, over := range []transport{overUDP, overTCP} {
				if err := w.compare(packet, over); err != nil {
					t.Errorf("label of %d bytes over %s, EDNS %d: %.300v", n+1, over, size, err)
				}
			}
			req.Extra = nil
		}
	}
	if w.seen["addresses"] == w.seen["truncated addresses"] {
		t.Error("no response was whole")
	}
}
