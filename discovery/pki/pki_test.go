package pki_test

import (
	"crypto/x509"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/discovery/pki"
)

const (
	day  = 24 * time.Hour
	name = "discovery.test.svc"
)

// epoch is when the certificates of most tests are made.
var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

// policy renews certificates after 70 % of their life.
func policy(names ...string) pki.Policy { return pki.Policy{Names: names, Share: 0.7} }

// renewed returns the certificates that should be in use at a time.
func renewed(t *testing.T, p pki.Policy, c *pki.Certificates, now time.Time) *pki.Certificates {
	t.Helper()
	next, err := p.Renewed(c, now)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

// trusts returns why an agent that trusts the roots does not accept the server at a time.
func trusts(roots string, c *pki.Certificates, now time.Time) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM([]byte(roots))
	_, err := c.Server().Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: name, CurrentTime: now})
	return err
}

// D50: for 30 years, in steps of at most 10 days, an agent accepts the server, also one that last
// read the certificates of the authorities two years ago.
func TestThirtyYears(t *testing.T) {
	p := policy(name)
	var c *pki.Certificates
	made, authorities, most := 0, map[string]bool{}, 0
	known := map[int]string{} // the roots by the step in which they were read
	for step, now := 0, epoch; now.Before(epoch.Add(30 * 365 * day)); step, now = step+1, now.Add(10*day) {
		next := renewed(t, p, c, now)
		if next != c {
			made++
		}
		c = next
		if due := p.Due(c); !due.After(now) {
			t.Fatalf("step %d: something is due at %v, and it is %v", step, due, now)
		}
		known[step] = c.Roots()
		authorities[c.Roots()] = true
		most = max(most, strings.Count(c.Roots(), "BEGIN"))
		for _, roots := range []string{c.Roots(), known[max(0, step-73)]} {
			if err := trusts(roots, c, now); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
		}
	}
	t.Logf("%d changes, %d sets of authorities", made, len(authorities))
	if made < 100 || made > 200 || len(authorities) < 5 || most != 2 {
		t.Errorf("%d changes, %d sets of authorities, at most %d at a time", made, len(authorities), most)
	}
}

// FuzzParse parses arbitrary data. Certificates that can be parsed can be renewed and written
// again.
func FuzzParse(f *testing.F) {
	c, err := policy(name).Renewed(nil, epoch)
	if err != nil {
		f.Fatal(err)
	}
	data, err := c.Data()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data["tls.crt"], data["tls.key"], data["ca.crt"], data["ca.key"])
	f.Add(data["ca.crt"], data["ca.key"], data["ca.crt"], data["ca.key"])
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"), []byte{}, data["ca.crt"], data["ca.key"])
	f.Fuzz(func(t *testing.T, certificate, key, authorities, authorityKey []byte) {
		c, err := pki.Parse(map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": authorities, "ca.key": authorityKey})
		if err != nil {
			return
		}
		next, err := policy(name).Renewed(c, epoch.Add(day))
		if err != nil {
			return // it is not valid yet
		}
		if _, err := next.Data(); err != nil {
			t.Error(err)
		}
		if due := policy(name).Due(next); due.Before(epoch.Add(day)) {
			t.Errorf("due at %v", due)
		}
	})
}
