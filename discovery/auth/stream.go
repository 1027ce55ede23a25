// Package auth decides which clients may open a stream. A client proves its identity with a token
// of its Kubernetes service account, or with a SPIFFE certificate. The node that the client claims to be
// must agree with the identity: a client gets no table of another namespace.
package auth

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
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

// Clients checks the clients of a TLS listener.
type Clients struct {
	Tokens      *Tokens // nil refuses tokens
	TrustDomain string  // of certificates
	Cluster     string  // the cluster whose API server reviews tokens; empty if clients may claim any cluster
	// Others returns the Tokens for which the API server of another cluster makes the reviews, or nil if there is no
	// such cluster. The field may be nil.
	Others func(cluster string) *Tokens
}

// A Client is the client that has opened a stream.
type Client struct {
	Identity
	// Ends is when the token or certificate that proves the identity ends; the zero time if this is not known.
	Ends    time.Time
	clients *Clients
	token   bool   // a token proves the identity
	cluster string // the cluster whose API server has reviewed the token; empty for the own cluster
}

// Client returns the client that has opened the stream with ctx. If the client has a token, its certificate does not
// count. The error has the code Unauthenticated, or Unavailable if the token cannot be reviewed now.
func (c *Clients) Client(ctx context.Context) (Client, error) {
	if token, ok := bearer(ctx); ok {
		cluster := c.other(header(ctx, "clusterid"))
		identity, ends, err := c.ofToken(ctx, token, cluster)
		return Client{identity, ends, c, true, cluster}, err
	}
	identity, ends, err := c.ofCertificate(ctx)
	return Client{Identity: identity, Ends: ends, clients: c}, err
}

// other returns "" if cluster is the own cluster or is not known, otherwise cluster.
func (c *Clients) other(cluster string) string {
	if c.Others == nil || cluster == c.Cluster || c.Others(cluster) == nil {
		return ""
	}
	return cluster
}

// ofCertificate returns the identity in the certificate of the client, and the earliest end of the certificates in
// its chain.
func (c *Clients) ofCertificate(ctx context.Context) (Identity, time.Time, error) {
	var info credentials.TLSInfo
	if p, found := peer.FromContext(ctx); found {
		info, _ = p.AuthInfo.(credentials.TLSInfo)
	}
	if len(info.State.VerifiedChains) == 0 {
		return Identity{}, time.Time{}, status.Error(codes.Unauthenticated, "no token and no client certificate: mount a service account's token for the agent")
	}
	chain := info.State.VerifiedChains[0]
	identity, err := OfCertificate(chain[0], c.TrustDomain)
	if err != nil {
		return Identity{}, time.Time{}, status.Error(codes.Unauthenticated, err.Error())
	}
	first := slices.MinFunc(chain, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
	return identity, first.NotAfter, nil
}

// ofToken returns the identity in a token, and when the token ends. The API server of the given cluster reviews the
// token; "" is the own cluster.
func (c *Clients) ofToken(ctx context.Context, token, cluster string) (Identity, time.Time, error) {
	tokens := c.Tokens
	if cluster != "" {
		tokens = c.Others(cluster)
	} else if claimed := header(ctx, "clusterid"); claimed != "" && c.Cluster != "" && claimed != c.Cluster {
		return Identity{}, time.Time{}, status.Errorf(codes.Unauthenticated, "the client claims to be of cluster %q, and tokens of %q are reviewed: check --cluster-id of the agent", claimed, c.Cluster)
	}
	if tokens == nil {
		return Identity{}, time.Time{}, status.Error(codes.Unauthenticated, "this control plane has no Kubernetes API to review tokens with: use a client certificate")
	}
	identity, ends, err := tokens.Identity(ctx, token)
	switch {
	case errors.Is(err, ErrUnavailable):
		err = status.Error(codes.Unavailable, err.Error())
	case err != nil:
		err = status.Error(codes.Unauthenticated, err.Error())
	}
	return identity, ends, err
}

// bearer returns the token of a request (RFC 6750, section 2.1).
func bearer(ctx context.Context) (token string, ok bool) {
	const scheme = "bearer "
	value := header(ctx, "authorization")
	if len(value) < len(scheme) || !strings.EqualFold(value[:len(scheme)], scheme) {
		return "", false
	}
	return value[len(scheme):], true
}

// header returns the first value of a header, or an empty string.
func header(ctx context.Context, name string) string {
	values := metadata.ValueFromIncomingContext(ctx, name)
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// Check returns an error with the code PermissionDenied unless a node claims to be this client. If
// the client has a token, the node must claim the cluster whose API server has reviewed the token.
func (c Client) Check(node *corev3.Node, namespace string) error {
	claimed := node.GetMetadata().GetFields()["CLUSTER_ID"].GetStringValue()
	if c.token && c.clients.other(claimed) != c.cluster {
		return status.Errorf(codes.PermissionDenied, "the node %q claims the cluster %q, and the API server of another one has reviewed its token: "+
			"check --cluster-id of the agent", node.GetId(), claimed)
	}
	if namespace != c.Namespace {
		return status.Errorf(codes.PermissionDenied, "the node %q claims the namespace %q, and its identity is %s", node.GetId(), namespace, c.Identity)
	}
	account := node.GetMetadata().GetFields()["SERVICE_ACCOUNT"].GetStringValue()
	if account != "" && account != c.ServiceAccount {
		return status.Errorf(codes.PermissionDenied, "the node %q claims the service account %q, and its identity is %s", node.GetId(), account, c.Identity)
	}
	return nil
}
