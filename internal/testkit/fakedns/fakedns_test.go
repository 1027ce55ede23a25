package fakedns_test

import (
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { wait.Main(m) }

func ask(t *testing.T, s *fakedns.Server, network string, req *dns.Msg) *dns.Msg {
	t.Helper()
	client := dns.Client{Net: network, Timeout: 30 * time.Second}
	resp, _, err := client.Exchange(req, s.Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func TestAnswer(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer("www.example. 60 IN A 192.0.2.1", "WWW.example. 60 IN A 192.0.2.2"))
	for _, c := range []struct {
		name           string
		qtype          uint16
		rcode, records int
	}{
		{"Www.Example.", dns.TypeA, dns.RcodeSuccess, 2},
		{"www.example.", dns.TypeAAAA, dns.RcodeSuccess, 0},
		{"other.example.", dns.TypeA, dns.RcodeNameError, 0},
	} {
		for _, network := range []string{"udp", "tcp"} {
			resp := ask(t, s, network, new(dns.Msg).SetQuestion(c.name, c.qtype))
			if resp.Rcode != c.rcode || len(resp.Answer) != c.records || resp.Question[0].Name != c.name {
				t.Errorf("%s over %s:\n%v", c.name, network, resp)
			}
		}
	}
	want := []fakedns.Query{{Name: "Www.Example.", Type: dns.TypeA, Network: "udp"}, {Name: "Www.Example.", Type: dns.TypeA, Network: "tcp"}}
	if got := s.Queries(); len(got) != 6 || !slices.Equal(got[:2], want) {
		t.Errorf("asked: %v", got)
	}
	s.Reset()
	if resp := ask(t, s, "udp", new(dns.Msg)); resp.Rcode != dns.RcodeFormatError {
		t.Errorf("without a question:\n%v", resp)
	}
	if got := s.Queries(); len(got) > 0 {
		t.Errorf("asked after Reset: %v", got)
	}
}

func TestHandle(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Rcode(dns.RcodeRefused))
	query := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
	if resp := ask(t, s, "udp", query); resp.Rcode != dns.RcodeRefused {
		t.Errorf("want REFUSED:\n%v", resp)
	}
	s.Handle(fakedns.Silence)
	client := dns.Client{Timeout: 100 * time.Millisecond}
	var timeout net.Error
	if resp, _, err := client.Exchange(query, s.Addr.String()); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("silence: %v, %v", resp, err)
	}
}

func TestAnswerRefusesBadRecords(t *testing.T) {
	t.Parallel()
	defer func() {
		if recover() == nil {
			t.Error("what is not a record is taken")
		}
	}()
	fakedns.Answer("www.example. IN A nowhere")
}

func TestSize(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer())
	for _, size := range []int{100, 512, 513, 1232, 4096, 65535} {
		s.Handle(fakedns.Size(size))
		for qtype, slack := range map[uint16]int{dns.TypeTXT: 2, dns.TypeA: 16, dns.TypeAAAA: 28} {
			resp := ask(t, s, "tcp", new(dns.Msg).SetQuestion("www.example.", qtype))
			resp.Compress = true
			wire, err := resp.Pack()
			if err != nil {
				t.Fatal(err)
			}
			if len(wire) > size || len(wire) <= size-slack {
				t.Errorf("%s: %d bytes, want about %d", dns.TypeToString[qtype], len(wire), size)
			}
		}
	}
	if resp := ask(t, s, "udp", new(dns.Msg).SetQuestion("www.example.", dns.TypeMX)); len(resp.Answer) > 0 {
		t.Errorf("MX:\n%v", resp)
	}
}

func TestTruncate(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Truncate(fakedns.Size(3000)))
	query := new(dns.Msg).SetQuestion("www.example.", dns.TypeTXT)
	if resp := ask(t, s, "udp", query); !resp.Truncated || len(resp.Answer) > 0 {
		t.Errorf("over UDP:\n%v", resp)
	}
	if resp := ask(t, s, "tcp", query); resp.Truncated || len(resp.Answer) != 1 {
		t.Errorf("over TCP:\n%v", resp)
	}
}
