package fakedns_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// exchange asks once, with little patience.
func exchange(s *fakedns.Server, network string) error {
	client := dns.Client{Net: network, Timeout: 10 * time.Second}
	_, _, err := client.Exchange(new(dns.Msg).SetQuestion("www.example.", dns.TypeA), s.Addr.String())
	return err
}

func TestRefused(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{"127.0.0.1:0", "127.0.0.2:0", "[::1]:0"} {
		on := fakedns.On(netip.MustParseAddrPort(addr))
		for _, c := range []struct {
			option           fakedns.Option
			refused, answers string
		}{{fakedns.NoUDP, "udp", "tcp"}, {fakedns.NoTCP, "tcp", "udp"}} {
			s, err := fakedns.Listen(fakedns.Answer(), on, c.option)
			if err != nil && addr == "[::1]:0" {
				t.Skipf("LEFT OUT: nameservers that refuse a transport over IPv6: %v", err)
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(s.Close)
			if s.Addr.Addr() != netip.MustParseAddrPort(addr).Addr() {
				t.Errorf("listens at %v, want %s", s.Addr, addr)
			}
			if err := exchange(s, c.refused); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%v over %s: %v, want a refusal", s.Addr, c.refused, err)
			}
			if err := exchange(s, c.answers); err != nil {
				t.Errorf("%v over %s: %v", s.Addr, c.answers, err)
			}
		}
	}
}

func TestBlackHole(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer(), fakedns.With(fakedns.OnUDP(fakedns.Drop)))
	client := dns.Client{Timeout: 100 * time.Millisecond}
	query := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
	if _, _, err := client.Exchange(query, s.Addr.String()); err == nil {
		t.Error("an answer over UDP")
	}
	if err := exchange(s, "tcp"); err != nil {
		t.Error(err)
	}
	if got := s.Queries(); len(got) != 2 {
		t.Errorf("asked: %v, want both", got)
	}
}

func TestRestart(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer())
	l := dial(t, "tcp", s)
	l.send(1, "www.example.")
	l.receive()
	addr := s.Addr
	if err := s.Restart(); err == nil {
		t.Error("a running server starts again")
	}
	for range 3 {
		s.Close()
		if err := exchange(s, "udp"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("closed: %v, want a refusal", err)
		}
		if err := s.Restart(); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(exchange(s, "udp"), exchange(s, "tcp")); err != nil || s.Addr != addr {
			t.Errorf("restarted at %v, which was at %v: %v", s.Addr, addr, err)
		}
	}
	if got := s.Queries(); len(got) != 7 {
		t.Errorf("asked: %v, want 7 questions", got)
	}
	s.Close()
	if err := s.Restart(fakedns.NoTCP); err != nil {
		t.Fatal(err)
	}
	if err := exchange(s, "tcp"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("restarted without TCP: %v, want a refusal", err)
	}
	s.Close()
	if err := s.Restart(fakedns.AllNetworks); err != nil {
		t.Fatal(err)
	}
	if err := exchange(s, "tcp"); err != nil {
		t.Errorf("restarted with TCP: %v", err)
	}
	s.Close()
	s.Close()
	s.Disconnect() // of no effect
}

func TestConnections(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer())
	l := dial(t, "tcp", s)
	for id := range uint16(3) {
		l.send(id, "www.example.")
		l.receive()
	}
	if got, from := s.Connections(), s.Sources(); got != 1 || len(from) != 3 || from[0].String() != l.LocalAddr().String() {
		t.Errorf("%d connections, queries from %v", got, from)
	}
	s.Disconnect()
	if n, err := l.Read(make([]byte, 1)); n > 0 || err == nil {
		t.Error("the connection is open")
	}
	if err := exchange(s, "tcp"); err != nil || s.Connections() != 2 {
		t.Errorf("%d connections, %v", s.Connections(), err)
	}
	s.Reset()
	if got, from := s.Connections(), s.Sources(); got != 0 || len(from) > 0 {
		t.Errorf("%d connections, queries from %v after Reset", got, from)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	s, authority := fakedns.StartTLS(t, fakedns.Answer(), "dns.example")
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authority) {
		t.Fatalf("no PEM: %s", authority)
	}
	for name, good := range map[string]bool{"dns.example": true, "other.example": false} {
		config := &tls.Config{RootCAs: pool, ServerName: name}
		client := dns.Client{Net: "tcp-tls", TLSConfig: config, Timeout: 10 * time.Second}
		_, _, err := client.Exchange(new(dns.Msg).SetQuestion("www.example.", dns.TypeA), s.Addr.String())
		if (err == nil) != good {
			t.Errorf("as %s: %v", name, err)
		}
	}
	if got := s.Queries(); len(got) != 1 || got[0].Network != "tls" {
		t.Errorf("asked: %v", got)
	}
	if err := exchange(s, "udp"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("over UDP: %v, want a refusal", err)
	}
}

func TestTakenPort(t *testing.T) {
	t.Parallel()
	s := fakedns.Start(t, fakedns.Answer())
	if other, err := fakedns.Listen(fakedns.Answer(), fakedns.On(s.Addr)); err == nil {
		other.Close()
		t.Error("two servers at one address")
	}
}
