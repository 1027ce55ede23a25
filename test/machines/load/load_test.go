package load_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/load"
)

// address returns a handler that answers every name with an address.
func address(text string) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetReply(query)
		header := dns.RR_Header{Name: query.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}
		reply.Answer = []dns.RR{&dns.A{Hdr: header, A: net.ParseIP(text)}}
		return reply
	}
}

// rcode returns a handler that answers with a response code.
func rcode(code int) fakedns.Handler {
	return func(query *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetRcode(query, code) }
}

// expect returns the expectation of one address.
func expect(text string) *load.Expectation {
	return &load.Expectation{
		Questions: []load.Question{{Name: "web.example", Addresses: load.Addrs(text)}, {Name: "*.other.example", Addresses: load.Addrs(text)}},
		Foreign:   []netip.Prefix{netip.MustParsePrefix("192.0.2.53/32")},
	}
}

// start starts a load of all transports for a server.
func start(t *testing.T, server netip.AddrPort) *load.Load {
	t.Helper()
	l, err := load.Start(load.Config{
		Server: server, Rate: 500, TCP: 0.2, Kept: 0.3, Timeout: 300 * time.Millisecond, Expect: expect("192.0.2.1"),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	return l
}

// more waits until the load has more queries of a kind.
func more(t *testing.T, l *load.Load, kind load.Kind) {
	t.Helper()
	want := l.Report().Count(kind) + 50
	wait.Until(t, "more queries end as "+string(kind), func() bool { return l.Report().Count(kind) >= want })
}

func TestKinds(t *testing.T) {
	t.Parallel()
	server := fakedns.Start(t, address("192.0.2.1"))
	l := start(t, server.Addr)
	more(t, l, load.Right)
	if got := l.Cut(); got.Bad() > 0 || got.Stray > 0 || len(got.Transports) != 3 || got.Latency.P50 == 0 || got.Latency.P50 > got.Latency.Max {
		t.Errorf("a server that answers: %v, %v", got, got.Transports)
	}
	for _, c := range []struct {
		kind    load.Kind
		handler fakedns.Handler
	}{
		{load.Wrong, address("192.0.2.2")},
		{load.Wrong, rcode(dns.RcodeNameError)},
		{load.Wrong, rcode(dns.RcodeSuccess)},
		{load.Foreign, address("192.0.2.53")},
		{load.Foreign, rcode(dns.RcodeRefused)},
		{load.Failed, rcode(dns.RcodeServerFailure)},
		{load.Lost, func(*dns.Msg, string) *dns.Msg { return nil }},
	} {
		server.Handle(c.handler)
		more(t, l, c.kind)
	}
	got := l.Cut()
	if examples := got.Examples[load.Wrong]; len(examples) != 10 || examples[0].Detail != "NOERROR [192.0.2.2]" {
		t.Errorf("examples of wrong answers: %v", examples)
	}
	if got.LongestGap < 300*time.Millisecond {
		t.Errorf("the longest time without a right answer is %v, want at least the timeout", got.LongestGap)
	}
	server.Close()
	more(t, l, load.Unreachable)
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	server.Handle(address("192.0.2.1"))
	more(t, l, load.Right)
	report := l.Stop()
	sum := 0
	for _, kind := range load.Kinds() {
		sum += report.Count(kind)
	}
	if sum != report.Queries || report.Count(load.Unsent) > 0 {
		t.Errorf("kinds have %d queries together, want all: %v", sum, report)
	}
}

func TestStrayPackets(t *testing.T) {
	t.Parallel()
	server := fakedns.Start(t, address("192.0.2.1"), fakedns.With(fakedns.First(fakedns.WrongID)))
	l := start(t, server.Addr)
	more(t, l, load.Right)
	server.Handle(address("192.0.2.1"), fakedns.First(fakedns.WrongQuestion))
	more(t, l, load.Right)
	server.Handle(address("192.0.2.1"), fakedns.OnUDP(fakedns.Duplicate(2)))
	more(t, l, load.Right)
	if got := l.Stop(); got.Bad() > 0 || got.Stray < 100 {
		t.Errorf("with stray packets: %v", got)
	}
}

// An answer is right if it was expected at some time between the query and the answer.
func TestExpectationChanges(t *testing.T) {
	t.Parallel()
	server := fakedns.Start(t, address("192.0.2.1"), fakedns.With(fakedns.Delay(50*time.Millisecond)))
	l := start(t, server.Addr)
	more(t, l, load.Right)
	previous, next := expect("192.0.2.1"), expect("192.0.2.2")
	if err := l.Expect(previous, next); err != nil {
		t.Fatal(err)
	}
	server.Handle(address("192.0.2.2"))
	changed := time.Now()
	wait.Until(t, "no previous answer is in flight", func() bool { return time.Since(changed) > 300*time.Millisecond })
	if err := l.Expect(next); err != nil {
		t.Fatal(err)
	}
	more(t, l, load.Right)
	if got := l.Cut(); got.Bad() > 0 {
		t.Errorf("with both expectations: %v", got)
	}
	server.Handle(address("192.0.2.1"))
	more(t, l, load.Wrong)
}

func TestExpectationIsChecked(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		`{}`, `{"questions": [{"name": ""}]}`, `{"questions": [{"name": "a", "type": "X"}]}`,
		`{"questions": [{"name": "a", "rcode": "X"}]}`, `{"question": []}`, `{"questions": [{"name": "a..b"}]}`,
	} {
		path := filepath.Join(t.TempDir(), "expect.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := load.ReadExpectation(path); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
}

func TestCommand(t *testing.T) {
	t.Parallel()
	if _, err := os.ReadDir("nametap-load"); err != nil { // Go's test cache keys on what the test opens
		t.Fatal(err)
	}
	dir := t.TempDir()
	binary, err := load.Build(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	expectation, err := json.Marshal(expect("192.0.2.1"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "expect.json")
	if err := os.WriteFile(path, expectation, 0o600); err != nil {
		t.Fatal(err)
	}
	server := fakedns.Start(t, address("192.0.2.1"))
	cmd := exec.CommandContext(t.Context(), binary, "-server", server.Addr.String(), "-rate", "200", "-expect", path)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	wait.Until(t, "the server has queries", func() bool { return len(server.Queries()) > 100 })
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := wait.For(t, "the command ends", ended); err != nil {
		t.Fatal(err)
	}
	var report load.Report
	if err := json.Unmarshal(output.Bytes(), &report); err != nil {
		t.Fatal(err)
	}
	if report.Queries < 100 || report.Bad() > 0 || report.Server != server.Addr {
		t.Errorf("the report: %v", report)
	}
}

func TestCheck(t *testing.T) {
	t.Parallel()
	server := fakedns.Start(t, address("192.0.2.1"))
	var bad atomic.Int64
	question := load.Question{Name: "*.example", Check: func(a load.Answer) error {
		if a.Sent.After(a.Received) || !slices.Equal(a.Addresses, load.Addrs("192.0.2.1")) || !strings.HasSuffix(a.Name, ".example.") {
			t.Errorf("the answer: %v", a)
		}
		return errors.New("as the test wants")
	}}
	l, err := load.Start(load.Config{
		Server: server.Addr, Rate: 500, Expect: &load.Expectation{Questions: []load.Question{question}},
		OnBad: func(load.Kind, load.Example) { bad.Add(1) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Stop() })
	more(t, l, load.Wrong)
	report := l.Stop()
	if report.Count(load.Wrong) != report.Queries || int(bad.Load()) != report.Queries {
		t.Errorf("OnBad has %d queries: %v", bad.Load(), report)
	}
	if got := report.Examples[load.Wrong][0].Detail; got != "NOERROR [192.0.2.1]: as the test wants" {
		t.Errorf("the detail is %q", got)
	}
}
