package upstream_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// certificate returns a self-signed certificate for dns.example and 127.0.0.1, and a file
// with it.
func certificate(t *testing.T) (cert tls.Certificate, roots string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		DNSNames: []string{"dns.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	roots = filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(roots, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, roots
}

// F15: a TLS server is asked over TLS only, on one connection, and its certificate must be valid
// for its name.
func TestTLS(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		cert, roots := certificate(t)
		s := serveTLS(t, answers(3), &tls.Config{Certificates: []tls.Certificate{cert}})
		c := client(t, upstream.Config{TLSRootsFile: roots})
		for _, name := range []string{"dns.example", ""} { // without a name, the address
			g := c.Group([]upstream.Spec{{Addr: s.addr, TLS: true, ServerName: name}}, upstream.Options{})
			for _, how := range []upstream.Mode{upstream.UDPThenTCP, upstream.UDPOnly, upstream.TCPOnly} {
				if got, _ := ask(t, g, how); code(got) != 3 {
					t.Errorf("%x", got)
				}
			}
		}
		if n := s.connections(); n != 2 {
			t.Errorf("%d connections", n)
		}
		for name, c := range map[string]*upstream.Client{
			"other.example": c, "dns.example": client(t, upstream.Config{}),
		} {
			g := c.Group([]upstream.Spec{{Addr: s.addr, TLS: true, ServerName: name}}, upstream.Options{})
			_, _, err := g.Exchange(context.Background(), query(), 0)
			var verification *tls.CertificateVerificationError
			if !errors.As(err, &verification) {
				t.Errorf("%s: %v", name, err)
			}
		}
		old := serveTLS(t, answers(0), &tls.Config{Certificates: []tls.Certificate{cert}, MaxVersion: tls.VersionTLS11})
		g := c.Group([]upstream.Spec{{Addr: old.addr, TLS: true, ServerName: "dns.example"}}, upstream.Options{})
		if got, _, err := g.Exchange(context.Background(), query(), 0); err == nil {
			t.Errorf("TLS 1.1: %x", got)
		}
	})
}

// F15: queries in flight share a connection, and their replies may come in any order.
func TestPipelining(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		const queries = 50
		var held [][]byte // by the one goroutine that serves the connection
		s := serve(t, func(query []byte, _ string) [][]byte {
			held = append([][]byte{reply(query, 3)}, held...)
			if len(held) < queries {
				return [][]byte{}
			}
			return held
		})
		g := client(t, upstream.Config{}).Group(specs(s), upstream.Options{})
		var asking sync.WaitGroup
		for i := range queries {
			asking.Go(func() {
				// Each has another name, so that swapped replies would be noticed.
				q := query()
				q[13], q[14] = 'a'+byte(i%26), 'a'+byte(i/26)
				got, _, err := g.Exchange(context.Background(), q, upstream.TCPOnly)
				if err != nil || string(got[:questionEnd]) != string(reply(q, 3)) {
					t.Errorf("%x, %v", got, err)
				}
			})
		}
		asking.Wait()
		if n := s.connections(); n != 1 {
			t.Errorf("%d connections", n)
		}
	})
}

// F15: a query that a connection which served before leaves unanswered is sent again on another,
// until one has not served.
func TestConnectionLost(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		var asked atomic.Int64
		s := serve(t, func(query []byte, _ string) [][]byte {
			if n := asked.Add(1); n == 2 || n >= 4 {
				return nil // closes
			}
			return [][]byte{reply(query, 0)}
		})
		g := client(t, upstream.Config{}).Group(specs(s), upstream.Options{UseVC: true})
		ask(t, g, 0) // 1
		ask(t, g, 0) // 2 is lost, 3
		if _, _, err := g.Exchange(context.Background(), query(), 0); err == nil || asked.Load() != 5 {
			t.Errorf("asked %d times, %v", asked.Load(), err)
		}
		if n := s.connections(); n != 3 {
			t.Errorf("%d connections", n)
		}
	})
}

// F15: no query fails because the server has closed the connection meanwhile.
func TestConnectionClosedWhileIdle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := serve(t, answers(0))
		g := client(t, upstream.Config{}).Group(specs(s), upstream.Options{})
		for range 20 {
			ask(t, g, upstream.TCPOnly)
			s.hangUp()
		}
		if n := s.connections(); n != 20 {
			t.Errorf("%d connections", n)
		}
	})
}
