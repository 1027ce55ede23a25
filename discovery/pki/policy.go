package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"time"
)

const (
	day = 24 * time.Hour
	// authorityLife equals the life of istiod's authority.
	authorityLife = 3650 * day
	// serverLife is 90 days: its last third leaves 30 days to notice that no replica can renew the certificate.
	serverLife = 90 * day
	// ClockTolerance is how much the clocks of machines may differ. A certificate becomes valid this much before it is
	// made.
	ClockTolerance = 5 * time.Minute
	// spread bounds how much later one replica renews a certificate than another, as a part of the certificate's life.
	spread = 0.05
)

// A Policy decides which certificates a replica wants.
type Policy struct {
	// Names are the DNS names of the server.
	Names []string
	// Share is the part of a certificate's life after which this replica renews it.
	Share float64
}

// NewPolicy returns a policy that renews certificates after two thirds of their life and a small random part of
// it.
func NewPolicy(names []string) Policy {
	return Policy{Names: names, Share: 2.0/3 + spread*mathrand.Float64()} //nolint:gosec // it is no secret
}

// Renewed returns the certificates that should be in use at a time: c itself if nothing is due. c may be
// nil.
func (p Policy) Renewed(c *Certificates, now time.Time) (*Certificates, error) {
	next := new(Certificates)
	if c != nil {
		*next = *c
		if from := c.server.Leaf.NotBefore; now.Before(from) {
			return nil, fmt.Errorf("%s is valid from %s on, and here it is %s: set the clocks of the nodes", keyCertificate, from.UTC().Format(time.RFC3339), now.UTC().Format(time.RFC3339))
		}
	}
	next.authorities = slices.DeleteFunc(slices.Clone(next.authorities), func(a authority) bool { return !now.Before(a.certificate.NotAfter) })
	changed := c == nil || len(next.authorities) < len(c.authorities)
	if p.wantsAuthority(next.authorities, now) {
		a, err := newAuthority(now)
		if err != nil {
			return nil, fmt.Errorf("making an authority: %w", err)
		}
		next.authorities, changed = append(next.authorities, a), true
	}
	if p.wantsServer(next, now) {
		var err error
		if next.server, err = next.sign(p.names(next.server, now), now); err != nil {
			return nil, fmt.Errorf("making the certificate of the server: %w", err)
		}
		changed = true
	}
	if !changed {
		return c, nil
	}
	return next, nil
}

// Due returns the time at which a certificate of c is next to be renewed, or at which an authority ends, whichever is
// earlier.
func (p Policy) Due(c *Certificates) time.Time {
	due := p.dueOf(c.server.Leaf)
	last := c.authorities[len(c.authorities)-1]
	for _, at := range []time.Time{p.dueOf(last.certificate), c.authorities[0].certificate.NotAfter} {
		if at.Before(due) {
			due = at
		}
	}
	return due
}

// dueOf returns when to renew a certificate.
func (p Policy) dueOf(certificate *x509.Certificate) time.Time {
	life := certificate.NotAfter.Sub(certificate.NotBefore)
	return certificate.NotBefore.Add(time.Duration(float64(life) * p.Share))
}

// wantsAuthority reports whether there is no authority, or the last one is due or has no key. The authorities must be
// sorted by the times at which they end.
func (p Policy) wantsAuthority(authorities []authority, now time.Time) bool {
	return len(authorities) == 0 || authorities[len(authorities)-1].key == nil || !now.Before(p.dueOf(authorities[len(authorities)-1].certificate))
}

// wantsServer reports whether the certificate of the server is missing or due, is not signed by an authority, or lacks
// a name.
func (p Policy) wantsServer(c *Certificates, now time.Time) bool {
	return c.server == nil || !now.Before(p.dueOf(c.server.Leaf)) || !slices.ContainsFunc(c.authorities, c.signedBy) ||
		slices.ContainsFunc(p.Names, func(name string) bool { return !slices.Contains(c.server.Leaf.DNSNames, name) })
}

// names returns the DNS names of the next certificate. If the current certificate in the parameter server is not due
// yet, its names are kept: another replica may want them, for example during the rollout of another setting.
func (p Policy) names(server *tls.Certificate, now time.Time) []string {
	names := slices.Clone(p.Names)
	if server != nil && now.Before(p.dueOf(server.Leaf)) {
		names = append(names, server.Leaf.DNSNames...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// newAuthority makes an authority. It can sign certificates of servers only.
func newAuthority(now time.Time) (authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return authority{}, err
	}
	template := &x509.Certificate{
		Subject:   pkix.Name{Organization: []string{"nametap"}, CommonName: "nametap-discovery " + now.UTC().Format(time.RFC3339)},
		NotBefore: now.Add(-ClockTolerance), NotAfter: now.Add(authorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	certificate, err := create(template, template, key, key)
	return authority{certificate, key}, err
}

// sign makes a certificate of the server. The oldest authority that has a key and outlives the certificate signs it;
// without such an authority, the last one signs it.
func (c *Certificates) sign(names []string, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	end := now.Add(serverLife)
	signer := c.authorities[len(c.authorities)-1]
	if i := slices.IndexFunc(c.authorities, func(a authority) bool { return a.key != nil && !a.certificate.NotAfter.Before(end) }); i >= 0 {
		signer = c.authorities[i]
	}
	if signer.certificate.NotAfter.Before(end) {
		end = signer.certificate.NotAfter
	}
	template := &x509.Certificate{
		Subject:  pkix.Name{Organization: []string{"nametap"}, CommonName: "nametap-discovery"},
		DNSNames: names, NotBefore: now.Add(-ClockTolerance), NotAfter: end,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	leaf, err := create(template, signer.certificate, key, signer.key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

// create signs a template for a key.
func create(template, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}
