package test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// TestTLSUpstream checks that an agent queries a nameserver over TLS only, whose root certificates are those of the system or in a
// file.
func TestTLSUpstream(t *testing.T) { // F15, R7
	t.Parallel()
	netns.Need(t, "dig")
	h := newHost(t)
	var authority []byte
	h.Run(func() {
		_, authority = fakedns.StartTLS(t, anyName("192.0.2.85"), "dns.example", fakedns.On(netip.MustParseAddrPort(named+":853")))
	})
	own := h.write("own.pem", string(authority))
	h.environment = []string{"SSL_CERT_FILE=" + own} // crypto/x509 reads the root certificates of the system there
	a := h.start("--upstream", "tls://"+named+"#dns.example")
	h.digs("192.0.2.85", "@127.0.0.1", "-p", "15053", "www.example.org")
	a.end(terminate)
	h.environment = nil
	h.start("--upstream", "tls://"+named+"#dns.example", "--upstream-root-ca", own)
	h.digs("192.0.2.85", "@127.0.0.1", "-p", "15053", "www.example.org")
	if got := h.named.Queries(); len(got) > 0 {
		t.Errorf("without TLS: %v", got)
	}
	r := h.nametap("agent", "--upstream-root-ca", h.write("empty.pem", ""))
	if r.code == 0 || !strings.Contains(r.stderr, "upstream-root-ca") || !strings.Contains(r.stderr, "empty.pem") {
		t.Errorf("%+v", r)
	}
}
