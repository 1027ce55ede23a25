package auth

import (
	"context"
	"errors"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// Clients knows the clients of a TLS listener.
type Clients struct {
	Tokens      *Tokens // nil refuses tokens
	TrustDomain string  // of certificates
	Cluster     string  // whose API server reviews tokens; empty for any
}

// Identity returns who has opened a stream: a token comes before a certificate. The error has the
// code Unauthenticated, or Unavailable if that cannot be found out now.
func (c *Clients) Identity(ctx context.Context) (Identity, error) {
	if token, ok := bearer(ctx); ok {
		return c.ofToken(ctx, token)
	}
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(credentials.TLSInfo); ok && len(info.State.VerifiedChains) > 0 {
			identity, err := OfCertificate(info.State.VerifiedChains[0][0], c.TrustDomain)
			if err != nil {
				return Identity{}, status.Error(codes.Unauthenticated, err.Error())
			}
			return identity, nil
		}
	}
	return Identity{}, status.Error(codes.Unauthenticated, "no token and no client certificate: mount a service account's token for the agent")
}

func (c *Clients) ofToken(ctx context.Context, token string) (Identity, error) {
	if c.Tokens == nil {
		return Identity{}, status.Error(codes.Unauthenticated, "this control plane has no Kubernetes API to review tokens with: use a client certificate")
	}
	if claimed := header(ctx, "clusterid"); claimed != "" && c.Cluster != "" && claimed != c.Cluster {
		return Identity{}, status.Errorf(codes.Unauthenticated, "the client claims to be of cluster %q, and tokens of %q are reviewed: check --cluster-id of the agent", claimed, c.Cluster)
	}
	identity, err := c.Tokens.Identity(ctx, token)
	switch {
	case errors.Is(err, ErrUnavailable):
		return Identity{}, status.Error(codes.Unavailable, err.Error())
	case err != nil:
		return Identity{}, status.Error(codes.Unauthenticated, err.Error())
	}
	return identity, nil
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

// Check returns an error with the code PermissionDenied unless a node says that it is of this
// identity.
func (i Identity) Check(node *corev3.Node, namespace string) error {
	if namespace != i.Namespace {
		return status.Errorf(codes.PermissionDenied, "the node %q claims the namespace %q, and its identity is %s", node.GetId(), namespace, i)
	}
	account := node.GetMetadata().GetFields()["SERVICE_ACCOUNT"].GetStringValue()
	if account != "" && account != i.ServiceAccount {
		return status.Errorf(codes.PermissionDenied, "the node %q claims the service account %q, and its identity is %s", node.GetId(), account, i)
	}
	return nil
}
