package main

import (
	"bytes"
	"encoding/pem"

	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// rootCertificates returns Mozilla's root certificates, for tls:// nameservers. They come from
// a Go module, so they are the same in a build on any machine. Roots that Mozilla accepts only
// for some certificates are left out, since a file of certificates cannot have such a limit.
func rootCertificates() []byte {
	var text bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			_ = pem.Encode(&text, &pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}) // in memory
		}
	}
	return text.Bytes()
}
