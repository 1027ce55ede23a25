package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A tapReceiver is a receiver of dnstap. It speaks Frame Streams as fstrm_capture does, and keeps the frames.
type tapReceiver struct {
	stalled bool // it accepts a connection and then reads nothing
	closing bool // it accepts a connection and then closes it

	tb       testing.TB
	listener net.Listener
	serving  sync.WaitGroup

	mu sync.Mutex
	tapState
}

// A tapState is what a receiver has received.
type tapState struct {
	conns    []net.Conn
	frames   [][]byte
	begun    []time.Time // when connections were accepted that have begun
	ended    int         // of these, those that are not read any more
	finished int         // of these, those with an orderly end
}

// start starts a receiver until the test ends.
func (r *tapReceiver) start(t *testing.T, network, address string) *tapReceiver {
	t.Helper()
	r.tb = t
	var err error
	if r.listener, err = net.Listen(network, address); err != nil {
		t.Fatal(err)
	}
	r.serving.Go(func() {
		for {
			conn, err := r.listener.Accept()
			if err != nil {
				return
			}
			r.change(func(s *tapState) { s.conns = append(s.conns, conn) })
			r.serving.Go(func() { r.serve(conn) })
		}
	})
	t.Cleanup(r.close)
	return r
}

// close ends the receiver and its connections.
func (r *tapReceiver) close() {
	_ = r.listener.Close()
	for _, conn := range r.state().conns {
		_ = conn.Close()
	}
	r.serving.Wait()
}

const (
	tapDropped = "nametap_dnstap_dropped_total" // counts messages that the agent has dropped
	tapAway    = "dnstap: no receiver takes messages"
	tapContent = "\x00\x00\x00\x01\x00\x00\x00\x16protobuf:dnstap.Dnstap"
)

// tapControl returns a control frame of Frame Streams.
func tapControl(kind byte, fields string) []byte {
	return slices.Concat([]byte{0, 0, 0, 0, 0, 0, 0, byte(4 + len(fields)), 0, 0, 0, kind}, []byte(fields))
}

// serve receives the frames of one connection.
func (r *tapReceiver) serve(conn net.Conn) {
	expect := func(want []byte) bool {
		got := make([]byte, len(want))
		if _, err := io.ReadFull(conn, got); err != nil {
			return false // the connection ends
		}
		if !bytes.Equal(got, want) {
			r.tb.Errorf("control frame %q, want %q", got, want)
			return false
		}
		return true
	}
	if !expect(tapControl(4, tapContent)) { // READY
		return
	}
	accepted := time.Now()
	_, _ = conn.Write(tapControl(1, tapContent)) // ACCEPT
	if !expect(tapControl(2, tapContent)) {      // START
		return
	}
	r.change(func(s *tapState) { s.begun = append(s.begun, accepted) })
	defer r.change(func(s *tapState) { s.ended++ })
	if r.stalled {
		return // close closes the connection
	}
	for !r.closing {
		var length uint32
		if binary.Read(conn, binary.BigEndian, &length) != nil {
			return
		}
		if length == 0 {
			if rest := tapControl(3, "")[4:]; expect(rest) { // STOP
				r.change(func(s *tapState) { s.finished++ })
				_, _ = conn.Write(tapControl(5, "")) // FINISH
			}
			return
		}
		frame := make([]byte, length)
		if _, err := io.ReadFull(conn, frame); err != nil {
			return
		}
		r.change(func(s *tapState) { s.frames = append(s.frames, frame) })
	}
	_ = conn.Close()
}

// change changes the state.
func (r *tapReceiver) change(do func(*tapState)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	do(&r.tapState)
}

// state returns the state.
func (r *tapReceiver) state() (now tapState) {
	r.change(func(s *tapState) { now = *s })
	return now
}

// take waits until n messages were received, and returns them. The agent had dropped messages before.
func (r *tapReceiver) take(a *liveAgent, n int, dropped float64) (messages []tapped) {
	r.tb.Helper()
	wait.Until(r.tb, fmt.Sprintf("%d messages were received or dropped", n), func() bool {
		return len(r.state().frames)+int(a.metric(tapDropped)-dropped) >= n
	})
	frames := r.state().frames
	if len(frames) != n {
		r.tb.Fatalf("%d messages were received, want %d", len(frames), n)
	}
	for _, frame := range frames {
		messages = append(messages, readTap(r.tb, frame))
	}
	r.change(func(s *tapState) { s.frames = nil })
	return messages
}

// A tapped is what the tests look at in a message of dnstap.proto.
type tapped struct {
	identity, version, kind, family, protocol string
	extra                                     map[string]any
	client, local                             netip.AddrPort
	query, response                           []byte
}

// readTap reads a frame.
func readTap(tb testing.TB, frame []byte) tapped {
	tb.Helper()
	outer, kinds := tapFields(tb, frame)
	if kinds[15] != 1 {
		tb.Errorf("the type of a Dnstap is %d, want MESSAGE", kinds[15])
	}
	texts, numbers := tapFields(tb, outer[14])
	address := func(ip, port protowire.Number) netip.AddrPort {
		addr, _ := netip.AddrFromSlice(texts[ip])
		return netip.AddrPortFrom(addr, uint16(numbers[port]))
	}
	m := tapped{
		identity: string(outer[1]), version: string(outer[2]),
		kind:   map[uint64]string{5: "CLIENT_QUERY", 6: "CLIENT_RESPONSE"}[numbers[1]],
		family: map[uint64]string{1: "INET", 2: "INET6"}[numbers[2]], protocol: map[uint64]string{1: "UDP", 2: "TCP"}[numbers[3]],
		client: address(4, 6), local: address(5, 7), query: texts[10], response: texts[14],
	}
	if err := json.Unmarshal(outer[3], &m.extra); err != nil && outer[3] != nil {
		tb.Fatalf("%v in %q", err, outer[3])
	}
	return m
}

// tapFields returns the fields of a protobuf message that have bytes, and those with a number.
func tapFields(tb testing.TB, message []byte) (texts map[protowire.Number][]byte, numbers map[protowire.Number]uint64) {
	tb.Helper()
	texts, numbers = make(map[protowire.Number][]byte), make(map[protowire.Number]uint64)
	for len(message) > 0 {
		field, kind, n := protowire.ConsumeField(message)
		if n < 0 {
			tb.Fatalf("%v in %q", protowire.ParseError(n), message)
		}
		switch value := message[protowire.SizeTag(field):n]; kind {
		case protowire.BytesType:
			texts[field], _ = protowire.ConsumeBytes(value)
		case protowire.VarintType:
			numbers[field], _ = protowire.ConsumeVarint(value)
		}
		message = message[n:]
	}
	return texts, numbers
}

// unpacked returns a message in wire format, and the text of its question and of its answers.
func unpacked(t *testing.T, wire []byte) (msg dns.Msg, question, answers string) {
	t.Helper()
	if err := msg.Unpack(wire); err != nil || len(msg.Question) != 1 {
		t.Fatalf("%v, %d questions in %q", err, len(msg.Question), wire)
	}
	var texts []string
	for _, rr := range msg.Answer {
		texts = append(texts, strings.Join(strings.Fields(rr.String()), " "))
	}
	q := msg.Question[0]
	return msg, q.Name + " " + dns.ClassToString[q.Qclass] + " " + dns.TypeToString[q.Qtype], strings.Join(texts, ",")
}

// metric returns the value of a metric of the agent.
func (a *liveAgent) metric(name string) float64 {
	a.tb.Helper()
	resp, err := http.Get("http://" + a.status + "/metrics")
	if err != nil {
		a.tb.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		a.tb.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, name+" "); found {
			number, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				a.tb.Fatal(err)
			}
			return number
		}
	}
	a.tb.Fatalf("there is no metric %s", name)
	return 0
}

// awaitReceiver waits until the agent has a connection to a receiver, or has none.
func (a *liveAgent) awaitReceiver(connected float64) {
	a.tb.Helper()
	wait.Until(a.tb, fmt.Sprintf("nametap_dnstap_connected is %v", connected),
		func() bool { return a.metric("nametap_dnstap_connected") == connected })
}

// R20: answers of the table, of nameservers and of the cache, failures, and what is malformed, over both transports: the
// frames have each query and the response to it.
func TestDnstap(t *testing.T) {
	t.Parallel()
	for network, address := range map[string]string{"unix": filepath.Join(t.TempDir(), "tap.sock"), "tcp": "127.0.0.1:0"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			r := new(tapReceiver).start(t, network, address)
			testDnstap(t, r)
		})
	}
}

func testDnstap(t *testing.T, r *tapReceiver) {
	t.Helper()
	addr := r.listener.Addr()
	a := startLive(t, "--dnstap", addr.Network()+"://"+addr.String())
	a.awaitReceiver(1)
	for _, name := range []string{"web.ns1.svc.cluster.local", "www.example", "www.example"} {
		a.ask(name)
	}
	a.set("upstream: [ONE]\nupstream-timeout: 50ms\n")
	a.ask("a.silent.example")
	client := dns.Client{Net: "tcp", Timeout: patience}
	if _, _, err := client.Exchange(new(dns.Msg).SetQuestion("www.example.", dns.TypeA), a.dns); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("udp", a.dns)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	malformed := []byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xff") // no question
	if _, err := conn.Write(malformed); err != nil {
		t.Fatal(err)
	}
	messages := r.take(a, 12, 0)
	type row struct{ question, protocol, status, answer, source, rows, server string }
	one := a.one.Addr.String()
	want := []row{
		{"web.ns1.svc.cluster.local. IN A", "UDP", "NOERROR", "web.ns1.svc.cluster.local. 30 IN A 10.0.0.1", "table", "N1 A1", ""},
		{"www.example. IN A", "UDP", "NOERROR", "www.example. TTL IN A " + oneIP, "upstream", "N9", one},
		{"www.example. IN A", "UDP", "NOERROR", "www.example. TTL IN A " + oneIP, "cache", "N9", one},
		{"a.silent.example. IN A", "UDP", "SERVFAIL", "", "upstream", "F4", ""},
		{"www.example. IN A", "TCP", "NOERROR", "www.example. TTL IN A " + oneIP, "cache", "N9", one},
	}
	hour := regexp.MustCompile(` 3[0-9]{3} IN`) // some of it may have passed
	for i, w := range want {
		query, response := messages[2*i], messages[2*i+1]
		asked, question, _ := unpacked(t, query.query)
		reply, _, answers := unpacked(t, response.response)
		text := func(key string) string { value, _ := response.extra[key].(string); return value }
		got := row{
			question, response.protocol, dns.RcodeToString[reply.Rcode], hour.ReplaceAllString(answers, " TTL IN"),
			text("source"), strings.Trim(fmt.Sprint(response.extra["rows"]), "[]"), text("server"),
		}
		if diff := cmp.Diff(w, got, cmp.AllowUnexported(row{})); diff != "" {
			t.Errorf("query %d (-want +got):\n%s", i, diff)
		}
		if query.kind != "CLIENT_QUERY" || response.kind != "CLIENT_RESPONSE" || asked.Id != reply.Id || reply.Id == 0 {
			t.Errorf("query %d: %+v, %+v", i, query, response)
		}
		if uid := response.extra["uid"]; uid != float64(os.Getuid()) {
			t.Errorf("query %d: uid %v", i, uid)
		}
		for _, m := range []tapped{query, response} {
			if m.identity != "web-0" || !strings.HasPrefix(m.version, "nametap ") || m.family != "INET" ||
				m.client.Addr().String() != "127.0.0.1" || m.client.Port() == 0 || m.local.String() != a.dns {
				t.Errorf("query %d: %+v", i, m)
			}
		}
	}
	formErr := []byte("\x12\x34\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00")
	if query, response := messages[10].query, messages[11].response; !bytes.Equal(query, malformed) || !bytes.Equal(response, formErr) {
		t.Errorf("a malformed query %q has the response %q", query, response)
	}
	if reason, _ := messages[7].extra["reason"].(string); !strings.Contains(reason, "no reply in time") {
		t.Errorf("reason %q", reason)
	}
	wait.Until(t, "12 frames were counted", func() bool { return a.metric("nametap_dnstap_frames_total") == 12 }) // after they were sent
}

// R20: the identity in dnstap is that of the pod, or the name of the host.
func TestDnstapIdentity(t *testing.T) {
	for env, want := range map[string]string{"": "web-0", "10.96.0.1": "web-0.ns1"} {
		t.Setenv(inPod, env)
		cfg, err := parsed(t, []string{"--pod-name", "web-0", "--namespace", "ns1"}, nil).config()
		if err != nil || cfg.Identity != want {
			t.Errorf("%q, %v, want %q", cfg.Identity, err, want)
		}
	}
}

// R20: while the receiver is away, or reads nothing, queries are answered, and what was dropped is counted. The agent
// connects again, follows its settings, and ends the stream in order.
func TestDnstapReceiverAway(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "tap.sock")
	a := startLive(t, "--log-level", "info")
	ask := func(n int) {
		t.Helper()
		for range n {
			if answer := a.ask("web"); answer != "30 10.0.0.1" {
				t.Fatalf("the answer is %q", answer)
			}
		}
	}
	ask(1)
	if a.metric(tapDropped) != 0 {
		t.Error("something was dropped without a receiver in the settings")
	}
	begun, tapping := time.Now(), "upstream: [ONE]\ndnstap: unix://"+path+"\n"
	a.set(tapping)
	wait.Until(t, "the receiver is away", func() bool { return a.log.Count(tapAway) > 0 })
	const asked, kept = 1100, 1024
	ask(asked)
	before := a.metric(tapDropped)
	if before != 2*(asked-kept) {
		t.Errorf("%v messages were dropped, want %d", before, 2*(asked-kept))
	}
	// An attempt that takes a second because the machine stands still has another line.
	if n, took := a.log.Count(tapAway), time.Since(begun); n > 1+int(took/time.Second) {
		t.Errorf("%d lines about the receiver in %v, want one", n, took)
	}
	r := new(tapReceiver).start(t, "unix", path)
	r.take(a, 2*kept, before)

	before = a.metric(tapDropped)
	r.close()
	a.awaitReceiver(0)
	r = new(tapReceiver).start(t, "unix", path)
	a.awaitReceiver(1)
	ask(10)
	r.take(a, 20, before) // and none was dropped over a reconnection without queries

	r.close()
	r = (&tapReceiver{stalled: true}).start(t, "unix", path)
	wait.Until(t, "the receiver stalls", func() bool { return len(r.state().begun) > 0 })
	before = a.metric(tapDropped)
	wait.Until(t, "messages are dropped", func() bool {
		ask(100)
		return a.metric(tapDropped) > before
	})
	r.close()
	r = new(tapReceiver).start(t, "unix", path)
	wait.Until(t, "the agent has connected again", func() bool { s := r.state(); return len(s.begun) > s.ended })
	a.awaitReceiver(1)
	begun = time.Now()
	a.set("upstream: [ONE]\n")
	wait.Until(t, "the stream ends", func() bool { s := r.state(); return len(s.begun) == s.ended })
	const finishTimeout = time.Second // then the agent closes the connection, in order or not
	if took := time.Since(begun); r.state().finished == 0 && took < finishTimeout {
		t.Errorf("the stream does not end in order, within %v", took)
	}
	a.awaitReceiver(0)
}

// R20: what accepts messages and closes each connection, such as a proxy without a receiver, is connected to ever more
// rarely, and the log does not say so each time.
func TestDnstapReceiverCloses(t *testing.T) {
	t.Parallel()
	r := (&tapReceiver{closing: true}).start(t, "unix", filepath.Join(t.TempDir(), "tap.sock"))
	a := startLive(t, "--log-level", "info", "--dnstap", "unix://"+r.listener.Addr().String())
	wait.Until(t, "two connections have no line in the log", func() bool {
		begun, lines := len(r.state().begun), a.log.Count(tapAway)
		return lines > 0 && begun >= lines+2
	})
	begun := r.state().begun
	const least = (250 + 500) / 2 * time.Millisecond // half of each pause is random
	if took := begun[2].Sub(begun[0]); took < least {
		t.Errorf("two more connections took %v, want %v at least", took, least)
	}
}

// R21: failures are logged in one line for each cause, with counts, the first client and an example. The mode changes while
// the agent runs.
func TestQueryLog(t *testing.T) {
	t.Parallel()
	a := startLive(t)
	const lines = `msg="queries failed"`
	a.one.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	a.ask("n1.one.bad.example")
	a.ask("n2.other.test")
	a.ask("web")
	wait.Until(t, "the failures are logged", func() bool { return a.log.Count(lines) > 0 })
	parts := []string{
		"level=WARN", lines, "count=", fmt.Sprintf(`reason="%s: SERVFAIL" row=F3`, a.one.Addr),
		fmt.Sprintf(`first_client="uid %d" example="n1.one.bad.example A"`, os.Getuid()),
	}
	if n := a.log.Count(parts...); n != 1 {
		t.Errorf("%d lines about the nameserver, want 1", n)
	}
	if n := a.log.Count("queries answered"); n != 0 {
		t.Errorf("%d lines about queries that were answered", n)
	}

	a.set("upstream: [ONE]\nquery-log: all\n")
	a.ask("web.ns1.svc.cluster.local")
	wait.Until(t, "an answer is logged", func() bool {
		return a.log.Count("level=INFO", `msg="queries answered"`, "reason=table") == 1
	})
	a.set("upstream: [ONE]\nquery-log: off\n")
	a.ask("n3.bad.example")
	a.set("upstream: [ONE]\nquery-log: failed\n")
	a.ask("n4.later.test") // whose line comes after that of the query before, if there was one
	wait.Until(t, "the next failure is logged", func() bool { return a.log.Count(lines, "n4.later.test") == 1 })
	if n := a.log.Count(lines, "n3.bad.example"); n != 0 {
		t.Errorf("%d lines while the log was off", n)
	}
}
