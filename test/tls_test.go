package test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// serveTLS starts a nameserver named dns.example that the host's agents trust.
func (h *host) serveTLS() *fakedns.Server {
	h.tb.Helper()
	var server *fakedns.Server
	var authority []byte
	h.Run(func() {
		server, authority = fakedns.StartTLS(h.tb, anyName("192.0.2.85"), "dns.example", fakedns.On(netip.MustParseAddrPort(named+":853")))
	})
	h.authority = authority
	// crypto/x509 reads the root certificates of the system here.
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
		h.digs("192.0.2.85", "@127.0.0.1", "-p", "15053", fmt.Sprintf("w%d.example.org", i))
	}
	// On a busy machine another connection is opened while the first one is silent, up to four.
	if n := server.Connections(); n < 1 || n > 4 {
		t.Errorf("20 queries over %d connections", n)
	}
	if got := h.named.Queries(); len(got) > 0 {
		t.Errorf("without TLS: %v", got)
	}
}

// TestTLSUpstreamOfAnotherName checks that a server with the certificate of another name
// gets no query.
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
		t.Errorf("the nameserver received %v", got)
	}
}

// TestTLSUpstreamRootCA checks that root certificates can come from a file.
func TestTLSUpstreamRootCA(t *testing.T) { // F15, R7
	t.Parallel()
	netns.Need(t, "dig")
	h := newHost(t)
	h.serveTLS()
	h.environment = nil
	h.start("--upstream", "tls://"+named+"#dns.example", "--upstream-root-ca", h.write("own.pem", string(h.authority)))
	h.digs("192.0.2.85", "@127.0.0.1", "-p", "15053", "www.example.org")
	r := h.nametap("agent", "--upstream-root-ca", h.write("empty.pem", ""))
	if r.code == 0 || !strings.Contains(r.stderr, "upstream-root-ca") || !strings.Contains(r.stderr, "empty.pem") {
		t.Errorf("%+v", r)
	}
}
