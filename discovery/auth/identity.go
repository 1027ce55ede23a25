// Package auth decides which clients may open a stream. A client proves its identity with a token
// of its Kubernetes service account, or with a SPIFFE certificate. The node that the client claims to be
// must agree with the identity: a client gets no table of another namespace.
package auth

import (
	"crypto/x509"
	"fmt"
	"strings"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// An Identity is a service account.
type Identity struct {
	Namespace, ServiceAccount string
}

// String returns "NAMESPACE/SERVICE-ACCOUNT".
func (i Identity) String() string { return i.Namespace + "/" + i.ServiceAccount }

// userPrefix begins the names of service accounts in Kubernetes.
const userPrefix = "system:serviceaccount:"

// The longest names of Kubernetes, in bytes.
const maxNamespace, maxAccount = 63, 253

// OfUser returns the identity of a user of the Kubernetes API.
func OfUser(name string) (Identity, error) {
	account, ok := strings.CutPrefix(name, userPrefix)
	namespace, account, found := strings.Cut(account, ":")
	if !ok || !found || namespace == "" || len(namespace) > maxNamespace || account == "" || len(account) > maxAccount || strings.Contains(account, ":") {
		return Identity{}, fmt.Errorf("the token is of user %q: want a service account's", name)
	}
	return Identity{namespace, account}, nil
}

// OfCertificate returns the identity in a certificate. Its only URI must be
// spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT, as in the certificates of Istio's workloads (SPIFFE-ID, section 2).
func OfCertificate(certificate *x509.Certificate, trustDomain string) (Identity, error) {
	if len(certificate.URIs) != 1 {
		return Identity{}, fmt.Errorf("the client's certificate has %d URIs: want one, spiffe://%s/ns/NAMESPACE/sa/SERVICE-ACCOUNT", len(certificate.URIs), trustDomain)
	}
	id, err := spiffeid.FromURI(certificate.URIs[0])
	parts := strings.Split(id.Path(), "/")
	if err != nil || id.TrustDomain().Name() != trustDomain || len(parts) != 5 || parts[1] != "ns" || parts[3] != "sa" || len(parts[2]) > maxNamespace || len(parts[4]) > maxAccount {
		return Identity{}, fmt.Errorf("the client's certificate is of %q: want spiffe://%s/ns/NAMESPACE/sa/SERVICE-ACCOUNT", certificate.URIs[0], trustDomain)
	}
	return Identity{parts[2], parts[4]}, nil
}
