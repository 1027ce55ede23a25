package auth

import (
	"crypto/x509"
	"net/url"
	"strings"
	"testing"
)

// D44: only service accounts have an identity.
func TestOfUser(t *testing.T) {
	for name, want := range map[string]Identity{
		"system:serviceaccount:shop:web": {"shop", "web"},
		"admin":                          {}, "system:serviceaccount:shop": {}, "system:serviceaccount::web": {},
		"system:serviceaccount:shop:": {}, "system:serviceaccount:shop:web:x": {}, "": {},
		"system:serviceaccount:" + strings.Repeat("x", 64) + ":web": {}, "system:serviceaccount:shop:" + strings.Repeat("x", 254): {},
	} {
		got, err := OfUser(name)
		if got != want || (err == nil) != (want != Identity{}) {
			t.Errorf("%q: %v, %v, want %v", name, got, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), `"`+name+`"`) {
			t.Errorf("the error does not name %q: %v", name, err)
		}
	}
}

// D46: the identity in a SPIFFE certificate.
func TestOfCertificate(t *testing.T) {
	for _, tt := range []struct {
		uris string
		want Identity
	}{
		{"spiffe://cluster.local/ns/shop/sa/web", Identity{"shop", "web"}},
		{"spiffe://other.domain/ns/shop/sa/web", Identity{}},
		{"https://cluster.local/ns/shop/sa/web", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/", Identity{}},
		{"spiffe://cluster.local/ns//sa/web", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web/more", Identity{}},
		{"spiffe://cluster.local/sa/web/ns/shop", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web spiffe://cluster.local/ns/data/sa/db", Identity{}},
		{"spiffe://user@cluster.local/ns/shop/sa/web", Identity{}},
		{"spiffe://@cluster.local/ns/shop/sa/web", Identity{}},
		{"spiffe://cluster.local:443/ns/shop/sa/web", Identity{}},
		{"spiffe://cluster.local:/ns/shop/sa/web", Identity{}},
		{"spiffe://Cluster.local/ns/shop/sa/web", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web?x=y", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web?", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web#x", Identity{}},
		{"spiffe://cluster.local/ns/sh%6Fp/sa/web", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/w%2Feb", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web%20", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/wéb", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/..", Identity{}},
		{"spiffe://cluster.local/ns/./sa/web", Identity{}},
		{"spiffe://cluster.local//ns/shop/sa/web", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/web/", Identity{}},
		{"spiffe:/ns/shop/sa/web", Identity{}},
		{"spiffe:cluster.local/ns/shop/sa/web", Identity{}},
		{"spiffe://cluster.local/ns/" + strings.Repeat("x", 64) + "/sa/web", Identity{}},
		{"spiffe://cluster.local/ns/shop/sa/" + strings.Repeat("x", 254), Identity{}},
		{"", Identity{}},
	} {
		certificate := new(x509.Certificate)
		for text := range strings.FieldsSeq(tt.uris) {
			uri, err := url.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			certificate.URIs = append(certificate.URIs, uri)
		}
		got, err := OfCertificate(certificate, "cluster.local")
		if got != tt.want || (err == nil) != (tt.want != Identity{}) {
			t.Errorf("%q: %v, %v, want %v", tt.uris, got, err, tt.want)
		}
	}
}
