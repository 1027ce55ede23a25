package pki_test

import (
	"crypto/x509"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

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

// The certificates in the data of a Secret are the same that were put there.
func TestData(t *testing.T) {
	c := renewed(t, policy(name), nil, epoch)
	old := renewed(t, policy(name), c, epoch.Add(8*365*day)) // two authorities
	for _, want := range []*pki.Certificates{c, old} {
		data, err := want.Data()
		if err != nil {
			t.Fatal(err)
		}
		got, err := pki.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		if got.Roots() != want.Roots() || !got.Server().Leaf.Equal(want.Server().Leaf) {
			t.Error("the certificates differ")
		}
		again, err := got.Data()
		if err != nil || !cmp.Equal(data, again) {
			t.Errorf("the data differs: %v", err)
		}
		if now := want.Server().Leaf.NotBefore.Add(time.Hour); renewed(t, policy(name), got, now) != got {
			t.Error("something is due")
		}
	}
	if c, err := pki.Parse(nil); c != nil || err != nil {
		t.Errorf("without data: %v, %v", c, err)
	}
}

// A certificate gets the names that a replica misses. It keeps the names that another replica wants
// until it is due.
func TestNames(t *testing.T) {
	c := renewed(t, policy("a.test"), nil, epoch)
	c = renewed(t, policy("b.test"), c, epoch.Add(day))
	if got := c.Server().Leaf.DNSNames; !slices.Equal(got, []string{"a.test", "b.test"}) {
		t.Errorf("names %v", got)
	}
	if renewed(t, policy("a.test"), c, epoch.Add(2*day)) != c {
		t.Error("two replicas with different names renew in turn")
	}
	roots := c.Roots()
	c = renewed(t, policy("b.test"), c, epoch.Add(80*day))
	if got := c.Server().Leaf.DNSNames; !slices.Equal(got, []string{"b.test"}) || c.Roots() != roots {
		t.Errorf("names %v", got)
	}
}

// Replicas renew at different times, from two thirds of the life on.
func TestSpread(t *testing.T) {
	c := renewed(t, policy(name), nil, epoch)
	seen := map[time.Time]bool{}
	for range 20 {
		due := pki.NewPolicy([]string{name}).Due(c)
		if seen[due] = true; due.Before(epoch.Add(59*day)) || due.After(epoch.Add(66*day)) {
			t.Errorf("due after %v", due.Sub(epoch))
		}
	}
	if len(seen) < 15 {
		t.Errorf("%d different times of 20", len(seen))
	}
}

// A replica whose clock is behind renews nothing.
func TestClockBehind(t *testing.T) {
	c := renewed(t, policy(name), nil, epoch)
	if _, err := policy(name).Renewed(c, epoch.Add(-time.Hour)); err == nil || !strings.Contains(err.Error(), "clocks") {
		t.Errorf("%v", err)
	}
}

// Data that cannot be used is named.
func TestDamagedData(t *testing.T) {
	data := func(p pki.Policy) map[string][]byte {
		data, err := renewed(t, p, nil, epoch).Data()
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	good, other := data(policy(name)), data(policy(name))
	for _, tt := range []struct {
		name, key string
		value     []byte // nil removes it
		want      string
	}{
		{"of another program", "ca.key", nil, "it has no ca.key, so nametap-discovery has not made it"},
		{"without a certificate", "tls.crt", nil, "tls.crt is missing"},
		{"without authorities", "ca.crt", nil, "ca.crt is missing"},
		{"no PEM", "tls.crt", []byte("nonsense"), "tls.crt and tls.key: tls: failed to find any PEM data"},
		{"other key", "tls.key", other["tls.key"], "tls.crt and tls.key: tls: private key does not match"},
		{"other authority", "ca.crt", other["ca.crt"], "want the certificate of an authority and its key"},
		{"no authority", "ca.crt", good["tls.crt"], "is not an authority's"},
		{"no key of the authority", "ca.key", []byte{}, "want the certificate of an authority and its key"},
		{"unusable key of the authority", "ca.key", []byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"), "ca.key: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			damaged := maps.Clone(good)
			if damaged[tt.key] = tt.value; tt.value == nil {
				delete(damaged, tt.key)
			}
			_, err := pki.Parse(damaged)
			if err == nil || !strings.Contains(err.Error(), tt.want) || errors.Is(err, pki.ErrForeign) != (tt.key == "ca.key" && tt.value == nil) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
	mixed := maps.Clone(good)
	mixed["ca.crt"], mixed["ca.key"] = other["ca.crt"], other["ca.key"]
	if _, err := pki.Parse(mixed); err == nil || !strings.Contains(err.Error(), "no certificate in ca.crt has signed it") {
		t.Errorf("%v", err)
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
