package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/leftout"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A tapReceiver is a receiver of dnstap. It speaks Frame Streams as fstrm_capture does, and keeps the frames.
type tapReceiver struct {
	tb       testing.TB
	listener net.Listener
	serving  sync.WaitGroup
	stalled  atomic.Bool // it accepts a connection and then reads nothing
	closing  atomic.Bool // it accepts a connection and then closes it

	mu       sync.Mutex
	conns    []net.Conn
	frames   [][]byte
	begun    int // connections that have begun
	finished int // connections with an orderly end
}

// startReceiver starts a receiver until the test ends.
func startReceiver(t *testing.T, network, address string) *tapReceiver {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	r := &tapReceiver{tb: t, listener: listener}
	r.serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, conn)
			r.mu.Unlock()
			r.serving.Go(func() { r.serve(conn) })
		}
	})
	t.Cleanup(r.close)
	return r
}

// close ends the receiver and its connections.
func (r *tapReceiver) close() {
	_ = r.listener.Close()
	r.mu.Lock()
	for _, conn := range r.conns {
		_ = conn.Close()
	}
	r.mu.Unlock()
	r.serving.Wait()
}

const tapContent = "\x00\x00\x00\x01\x00\x00\x00\x16protobuf:dnstap.Dnstap"

// tapControl returns a control frame of Frame Streams.
func tapControl(kind byte, fields string) []byte {
	return slices.Concat([]byte{0, 0, 0, 0, 0, 0, 0, byte(4 + len(fields)), 0, 0, 0, kind}, []byte(fields))
}

// serve receives the frames of one connection.
func (r *tapReceiver) serve(conn net.Conn) {
	expect := func(want []byte) bool {
		got := make([]byte, len(want))
		if _, err := io.ReadFull(conn, got); err != nil {
			return false // the test ends
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
	_, _ = conn.Write(tapControl(1, tapContent)) // ACCEPT
	if !expect(tapControl(2, tapContent)) {      // START
		return
	}
	r.mu.Lock()
	r.begun++
	r.mu.Unlock()
	if r.closing.Load() {
		_ = conn.Close()
		return
	}
	if r.stalled.Load() {
		return // close closes the connection
	}
	for {
		var length uint32
		if binary.Read(conn, binary.BigEndian, &length) != nil {
			return
		}
		if length == 0 {
			if rest := tapControl(3, "")[4:]; expect(rest) { // STOP
				r.mu.Lock()
				r.finished++
				r.mu.Unlock()
				_, _ = conn.Write(tapControl(5, "")) // FINISH
			}
			return
		}
		frame := make([]byte, length)
		if _, err := io.ReadFull(conn, frame); err != nil {
			return
		}
		r.mu.Lock()
		r.frames = append(r.frames, frame)
		r.mu.Unlock()
	}
}

// received returns how many frames, connections and orderly ends there were.
func (r *tapReceiver) received() (frames, begun, finished int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.frames), r.begun, r.finished
}

// take waits for n frames and returns them.
func (r *tapReceiver) take(n int) [][]byte {
	r.tb.Helper()
	wait.Until(r.tb, fmt.Sprintf("%d frames were received", n), func() bool {
		frames, _, _ := r.received()
		return frames >= n
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	frames := r.frames
	r.frames = nil
	return frames
}

// A tapped is a message as dnstap-read shows it.
type tapped struct {
	Type, Identity, Version string
	Message                 struct {
		Type           string
		QueryTime      string        `yaml:"query_time"`
		ResponseTime   string        `yaml:"response_time"`
		SocketFamily   string        `yaml:"socket_family"`
		SocketProtocol string        `yaml:"socket_protocol"`
		QueryAddress   string        `yaml:"query_address"`
		Address        string        `yaml:"response_address"`
		QueryPort      int           `yaml:"query_port"`
		Port           int           `yaml:"response_port"`
		Query          tappedMessage `yaml:"query_message_data"`
		Response       tappedMessage `yaml:"response_message_data"`
	}
}

type tappedMessage struct {
	Status   string
	ID       int
	Flags    string
	Question []string `yaml:"QUESTION_SECTION"`
	Answer   []string `yaml:"ANSWER_SECTION"`
}

// readTap reads frames with dnstap-read of BIND.
func readTap(t *testing.T, frames [][]byte) (all []tapped) {
	t.Helper()
	content := tapControl(2, tapContent)
	for _, frame := range frames {
		content = binary.BigEndian.AppendUint32(content, uint32(len(frame)))
		content = append(content, frame...)
	}
	file := filepath.Join(t.TempDir(), "frames")
	if err := os.WriteFile(file, append(content, tapControl(3, "")...), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(tapTool(t, "dnstap-read", "bind9-dnsutils"), "-y", file).CombinedOutput()
	if err != nil {
		t.Fatalf("dnstap-read: %v: %s", err, out)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(out))
	for {
		var message tapped
		err := decoder.Decode(&message)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%v in\n%s", err, out)
		}
		all = append(all, message)
	}
}

// tapTool returns the path of a command. Without it the test is left out.
func tapTool(t *testing.T, name, debian string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		leftout.Test(t, "%s, it needs the package %s: %v", t.Name(), debian, err)
	}
	return path
}

// extraOf returns the field extra of a Dnstap message, which dnstap-read does not show.
func extraOf(t *testing.T, frame []byte) (extra map[string]any) {
	t.Helper()
	for len(frame) > 0 {
		number, kind, n := protowire.ConsumeTag(frame)
		if n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		frame = frame[n:]
		if n = protowire.ConsumeFieldValue(number, kind, frame); n < 0 {
			t.Fatal(protowire.ParseError(n))
		}
		if number == 3 {
			text, _ := protowire.ConsumeBytes(frame)
			if err := json.Unmarshal(text, &extra); err != nil {
				t.Fatalf("%v in %q", err, text)
			}
		}
		frame = frame[n:]
	}
	return extra
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

// R20: answers of the table, of nameservers and of the cache, failures, and what is malformed, over both transports:
// dnstap-read finds in the frames each query and the response to it.
func TestDnstap(t *testing.T) {
	t.Parallel()
	for network, address := range map[string]string{"unix": filepath.Join(t.TempDir(), "tap.sock"), "tcp": "127.0.0.1:0"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			testDnstap(t, startReceiver(t, network, address))
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
	if _, err := conn.Write([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xff")); err != nil { // no question
		t.Fatal(err)
	}
	frames := r.take(12)
	type row struct{ question, protocol, status, answer, source, rows, server string }
	one := a.one.Addr.String()
	want := []row{
		{"web.ns1.svc.cluster.local. IN A", "UDP", "NOERROR", "web.ns1.svc.cluster.local. 30 IN A 10.0.0.1", "table", "N1 A1", ""},
		{"www.example. IN A", "UDP", "NOERROR", "www.example. TTL IN A " + oneIP, "upstream", "N9", one},
		{"www.example. IN A", "UDP", "NOERROR", "www.example. TTL IN A " + oneIP, "cache", "N9", one},
		{"a.silent.example. IN A", "UDP", "SERVFAIL", "", "upstream", "F4", ""},
		{"www.example. IN A", "TCP", "NOERROR", "www.example. TTL IN A " + oneIP, "cache", "N9", one},
	}
	messages, hour := readTap(t, frames), regexp.MustCompile(` 3[0-9]{3} IN`) // some of it may have passed
	if len(messages) != 11 {                                                  // it leaves out messages without a question
		t.Fatalf("dnstap-read finds %d messages, want 11", len(messages))
	}
	for i, w := range want {
		query, response := messages[2*i], messages[2*i+1]
		m, extra := response.Message, extraOf(t, frames[2*i+1])
		text := func(key string) string { value, _ := extra[key].(string); return value }
		got := row{
			strings.Join(query.Message.Query.Question, ","), m.SocketProtocol, m.Response.Status,
			hour.ReplaceAllString(strings.Join(m.Response.Answer, ","), " TTL IN"), text("source"), strings.Trim(fmt.Sprint(extra["rows"]), "[]"), text("server"),
		}
		if diff := cmp.Diff(w, got, cmp.AllowUnexported(row{})); diff != "" {
			t.Errorf("query %d (-want +got):\n%s", i, diff)
		}
		if query.Message.Type != "CLIENT_QUERY" || m.Type != "CLIENT_RESPONSE" || query.Message.Query.ID != m.Response.ID || m.Response.ID == 0 {
			t.Errorf("query %d: %+v, %+v", i, query.Message, m)
		}
		if extra["uid"] != float64(os.Getuid()) {
			t.Errorf("query %d: uid %v", i, extra["uid"])
		}
		for _, message := range []tapped{query, response} {
			m := message.Message
			if message.Identity != "web-0" || !strings.HasPrefix(message.Version, "nametap ") || m.SocketFamily != "INET" ||
				m.QueryAddress != "127.0.0.1" || m.QueryPort == 0 || m.Address+":"+strconv.Itoa(m.Port) != a.dns {
				t.Errorf("query %d: %+v", i, message)
			}
		}
	}
	if formErr := []byte("\x12\x34\x81\x81\x00\x00\x00\x00\x00\x00\x00\x00"); !bytes.Contains(frames[11], formErr) {
		t.Errorf("the response to a malformed query is not in %q", frames[11])
	}
	if reason, _ := extraOf(t, frames[7])["reason"].(string); !strings.Contains(reason, "no reply in time") {
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
	if a.metric("nametap_dnstap_dropped_total") != 0 {
		t.Error("something was dropped without a receiver in the settings")
	}
	a.set("upstream: [ONE]\ndnstap: unix://" + path + "\n")
	wait.Until(t, "the receiver is away", func() bool { return a.log.Count("dnstap: no receiver takes messages") > 0 })
	const asked, kept = 1100, 1024
	ask(asked)
	if dropped := a.metric("nametap_dnstap_dropped_total"); dropped != 2*(asked-kept) {
		t.Errorf("%v messages were dropped, want %d", dropped, 2*(asked-kept))
	}
	if n := a.log.Count("dnstap: no receiver takes messages"); n != 1 {
		t.Errorf("%d lines about the receiver, want one", n)
	}
	r := startReceiver(t, "unix", path)
	r.take(2 * kept)
	before := a.metric("nametap_dnstap_dropped_total")

	r.close()
	a.awaitReceiver(0)
	r = startReceiver(t, "unix", path)
	a.awaitReceiver(1)
	ask(10)
	r.take(20)
	if dropped := a.metric("nametap_dnstap_dropped_total"); dropped != before {
		t.Errorf("%v messages were dropped over a reconnection without queries", dropped-before)
	}

	r.close()
	r = startReceiver(t, "unix", path)
	r.stalled.Store(true)
	wait.Until(t, "the receiver stalls", func() bool { _, begun, _ := r.received(); return begun > 0 })
	wait.Until(t, "messages are dropped", func() bool {
		ask(100)
		return a.metric("nametap_dnstap_dropped_total") > before
	})
	r.close()
	r = startReceiver(t, "unix", path)
	wait.Until(t, "the agent has connected again", func() bool { _, begun, _ := r.received(); return begun > 0 })
	a.set("upstream: [ONE]\n")
	wait.Until(t, "the stream ends in order", func() bool { _, _, finished := r.received(); return finished == 1 })
	a.awaitReceiver(0)
}

// R20: what accepts messages and closes each connection, such as a proxy without a receiver, is connected to ever more
// rarely, and the log does not say so each time.
func TestDnstapReceiverCloses(t *testing.T) {
	t.Parallel()
	r := startReceiver(t, "unix", filepath.Join(t.TempDir(), "tap.sock"))
	r.closing.Store(true)
	a := startLive(t, "--log-level", "info", "--dnstap", "unix://"+r.listener.Addr().String())
	begun := func(n int) {
		t.Helper()
		wait.Until(t, fmt.Sprintf("the agent has connected %d times", n), func() bool { _, begun, _ := r.received(); return begun >= n })
	}
	begun(1)
	start := time.Now()
	begun(3)
	const least = (250 + 500) / 2 * time.Millisecond // half of each pause is random
	if took := time.Since(start); took < least-50*time.Millisecond {
		t.Errorf("two more connections took %v, want %v at least", took, least)
	}
	if n := a.log.Count("dnstap: no receiver takes messages"); n != 1 {
		t.Errorf("%d lines about the receiver, want one", n)
	}
}

// R21: failures are logged in one line for each suffix and reason, with a count, the first client and an example. The mode
// changes while the agent runs.
func TestQueryLog(t *testing.T) {
	t.Parallel()
	a := startLive(t)
	const lines = `msg="queries failed"`
	a.one.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	a.ask("n1.one.bad.example")
	a.ask("n2.other.test")
	a.ask("web")
	wait.Until(t, "both suffixes are logged", func() bool { return a.log.Count(lines) >= 2 })
	who := fmt.Sprintf(`first_client="uid %d" example="n1.one.bad.example A"`, os.Getuid())
	reason := fmt.Sprintf(`rcode=SERVFAIL reason="%s: SERVFAIL" row=F3`, a.one.Addr)
	for suffix, parts := range map[string][]string{"bad.example": {reason, who}, "other.test": {reason}} {
		if n := a.log.Count(append(parts, "level=WARN", lines, "suffix="+suffix+" ", "count=")...); n != 1 {
			t.Errorf("%d lines about %s, want 1", n, suffix)
		}
	}
	if n := a.log.Count("queries answered"); n != 0 {
		t.Errorf("%d lines about queries that were answered", n)
	}

	a.set("upstream: [ONE]\nquery-log: all\n")
	a.ask("web.ns1.svc.cluster.local")
	wait.Until(t, "an answer is logged", func() bool {
		return a.log.Count("level=INFO", `msg="queries answered"`, "suffix=ns1.svc.cluster.local ", "source=table") == 1
	})
	a.set("upstream: [ONE]\nquery-log: off\n")
	a.ask("n3.bad.example")
	a.set("upstream: [ONE]\nquery-log: failed\n")
	a.ask("n4.later.test") // whose line comes after that of the query before, if there was one
	wait.Until(t, "the next failure is logged", func() bool { return a.log.Count(lines, "suffix=later.test ") == 1 })
	if n := a.log.Count(lines, "n3.bad.example"); n != 0 {
		t.Errorf("%d lines while the log was off", n)
	}
}
