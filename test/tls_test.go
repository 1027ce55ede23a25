package test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/fakedns"
	"github.com/nametap/nametap/internal/netns"
)

// serveTLS starts a nameserver named dns.example that the host's agents trust.
func (h *host) serveTLS() *fakedns.Server {
	h.tb.Helper()
	var server *fakedns.Server
	var authority []byte
	var err error
	h.Run(func() {
		server, authority, err = fakedns.StartTLS(anyName("192.0.2.85"), "dns.example", fakedns.On(netip.MustParseAddrPort(named+":853")))
	})
	if err != nil {
		h.tb.Fatal(err)
	}
	h.tb.Cleanup(server.Close)
	// Where crypto/x509 looks for the authorities of the system.
	h.environment = append(h.environment, "SSL_CERT_FILE="+h.write("authority.pem", string(authority)))
	return server
}

func TestTLSUpstream(t *testing.T) { // F15
	t.Parallel()
	netns.Need(t, "dig")
	h := newHost(t)
	server := h.serveTLS()
	h.start("--upstream", "tls://"+named+"#dns.example")
	for i := range 20 {
		if got := h.dig("@127.0.0.1", "-p", "15053", fmt.Sprintf("w%d.example.org", i)); got != "192.0.2.85" {
			t.Fatalf("query %d: %s", i, got)
		}
	}
	if n := server.Connections(); n != 1 {
		t.Errorf("20 queries over %d connections", n)
	}
	if got := h.named.Queries(); len(got) > 0 {
		t.Errorf("in the clear: %v", got)
	}
}

// A server that cannot show that it is the one is told nothing.
func TestTLSUpstreamOfAnotherName(t *testing.T) { // F15
	t.Parallel()
	netns.Need(t, "dig")
	h := newHost(t)
	server := h.serveTLS()
	h.start("--upstream", "tls://"+named+"#other.example")
	output := h.Exec("dig", "+tries=1", "@127.0.0.1", "-p", "15053", "www.example.org")
	if !strings.Contains(output, "SERVFAIL") || !strings.Contains(output, "certificate is valid for dns.example, not other.example") {
		t.Errorf("%s", output)
	}
	if got := server.Queries(); len(got) > 0 {
		t.Errorf("it was asked %v", got)
	}
}
