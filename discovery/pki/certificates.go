package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"slices"
)

// The keys of the data of a Secret. The keys for the server's certificate are those of a Secret of the type
// kubernetes.io/tls.
const (
	keyCertificate  = "tls.crt"
	keyPrivate      = "tls.key"
	keyAuthorities  = "ca.crt"
	keyAuthorityKey = "ca.key"
)

// Types of blocks in PEM.
const (
	blockCertificate = "CERTIFICATE"
	blockKey         = "PRIVATE KEY"
)

// ErrForeign is returned for data that another program has made.
var ErrForeign = errors.New("nametap-discovery has not made it")

// Certificates has the certificates that the replicas share. It never changes. Make one with [Policy.Renewed] or
// [Parse].
type Certificates struct {
	authorities []authority // in the order of their ends
	server      *tls.Certificate
}

// An authority signs the certificates of servers.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey // nil if the authority is only trusted
}

// Server returns the certificate of the server, with its Leaf. The caller must not change it.
func (c *Certificates) Server() *tls.Certificate { return c.server }

// Roots returns the certificates of the authorities in PEM.
func (c *Certificates) Roots() string {
	var text bytes.Buffer
	for _, a := range c.authorities {
		text.Write(encode(blockCertificate, a.certificate.Raw))
	}
	return text.String()
}

// Data returns the data of a Secret with the certificates.
func (c *Certificates) Data() (map[string][]byte, error) {
	key, err := encodeKey(c.server.PrivateKey)
	if err != nil {
		return nil, err
	}
	var keys []byte
	for _, a := range c.authorities {
		if a.key == nil {
			continue
		}
		text, err := encodeKey(a.key)
		if err != nil {
			return nil, err
		}
		keys = append(keys, text...)
	}
	return map[string][]byte{
		keyCertificate: encode(blockCertificate, c.server.Certificate[0]), keyPrivate: key,
		keyAuthorities: []byte(c.Roots()), keyAuthorityKey: keys,
	}, nil
}

// Parse returns the certificates in the data of a Secret, or nil if there is no data. The error
// wraps [ErrForeign] if another program made the data.
func Parse(data map[string][]byte) (*Certificates, error) {
	if len(data) == 0 {
		return nil, nil //nolint:nilnil // documented
	}
	if _, ok := data[keyAuthorityKey]; !ok {
		return nil, fmt.Errorf("it has no %s, so %w", keyAuthorityKey, ErrForeign)
	}
	for _, name := range []string{keyCertificate, keyPrivate, keyAuthorities} {
		if len(data[name]) == 0 {
			return nil, fmt.Errorf("%s is missing", name)
		}
	}
	c := new(Certificates)
	var err error
	if c.authorities, err = parseAuthorities(data[keyAuthorities], data[keyAuthorityKey]); err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair(data[keyCertificate], data[keyPrivate])
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", keyCertificate, keyPrivate, err)
	}
	c.server = &pair
	if !slices.ContainsFunc(c.authorities, c.signedBy) {
		return nil, fmt.Errorf("%s: no certificate in %s has signed it", keyCertificate, keyAuthorities)
	}
	return c, nil
}

// signedBy reports whether an authority has signed the certificate of the server.
func (c *Certificates) signedBy(a authority) bool {
	return c.server.Leaf.CheckSignatureFrom(a.certificate) == nil
}

// parseAuthorities returns authorities. The parameter certificates has their certificates in PEM. The parameter keys
// has the private keys of those that may sign.
func parseAuthorities(certificates, keys []byte) ([]authority, error) {
	var all []authority
	for _, der := range decode(blockCertificate, certificates) {
		certificate, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", keyAuthorities, err)
		}
		if !certificate.IsCA {
			return nil, fmt.Errorf("%s: the certificate of %q is not an authority's", keyAuthorities, certificate.Subject)
		}
		all = append(all, authority{certificate: certificate})
	}
	for _, der := range decode(blockKey, keys) {
		parsed, err := x509.ParsePKCS8PrivateKey(der)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", keyAuthorityKey, err)
		}
		key, ok := parsed.(*ecdsa.PrivateKey)
		if !ok {
			return nil, fmt.Errorf("%s: want ECDSA keys, got %T", keyAuthorityKey, parsed)
		}
		for i := range all {
			if key.PublicKey.Equal(all[i].certificate.PublicKey) {
				all[i].key = key
			}
		}
	}
	if !slices.ContainsFunc(all, func(a authority) bool { return a.key != nil }) {
		return nil, fmt.Errorf("%s and %s: want the certificate of an authority and its key", keyAuthorities, keyAuthorityKey)
	}
	slices.SortStableFunc(all, func(a, b authority) int { return a.certificate.NotAfter.Compare(b.certificate.NotAfter) })
	return all, nil
}

// encode returns a block in PEM.
func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// encodeKey returns a private key in PEM.
func encodeKey(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encoding a private key: %w", err)
	}
	return encode(blockKey, der), nil
}

// decode returns the contents of the blocks of one kind in PEM.
func decode(kind string, text []byte) [][]byte {
	var all [][]byte
	for {
		var block *pem.Block
		if block, text = pem.Decode(text); block == nil {
			return all
		}
		if block.Type == kind {
			all = append(all, block.Bytes)
		}
	}
}
