package nds

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// connectionError reports whether text, the text of a gRPC error, is about a connection that this host could not make
// or has lost. Otherwise the text is a message of the server.
func connectionError(text string) bool {
	return strings.Contains(text, "connection error: ") || strings.Contains(text, "error reading from server: ")
}

// advise adds to err the setting to check, if the cause of err is known. addr is the address of the server, and
// addrFlag is the flag that sets addr.
func advise(cfg Config, addr, addrFlag string, err error) error {
	advice := advice(cfg, addr, addrFlag, err)
	if advice == "" {
		return err
	}
	return fmt.Errorf("%w; %s", err, advice)
}

func advice(cfg Config, addr, addrFlag string, err error) string {
	if err == nil {
		return ""
	}
	switch status.Code(err) {
	case codes.Unauthenticated:
		return tokenAdvice(cfg)
	case codes.PermissionDenied:
		return fmt.Sprintf("the token or certificate must be for namespace %q (--namespace) and service account %q (--service-account)",
			cfg.Node.Namespace, cfg.Node.ServiceAccount)
	default:
	}
	if _, fromGRPC := status.FromError(err); fromGRPC && !connectionError(err.Error()) {
		return "" // the server's message may quote an error of another connection
	}
	if errors.As(err, new(*net.DNSError)) {
		return "the nameservers of this host must know that name: look at resolv.conf, or set " + addrFlag + " to another name or an address"
	}
	if errors.As(err, new(dialError)) {
		return fmt.Sprintf("is there a server at %s (%s)?", addr, addrFlag)
	}
	text, preface := err.Error(), "the server ended the connection: look at its log"
	if cfg.Plaintext {
		preface = "if the server wants TLS, leave out --xds-plaintext, or use another port (" + addrFlag + ")"
	}
	for _, known := range []struct{ text, advice string }{
		{"first record does not look like a TLS handshake", "the server does not speak TLS: --xds-plaintext, or another port (" + addrFlag + ")"},
		{"remote error: tls: ", "the server wants a client certificate that it trusts (--xds-cert, --workload-cert), or another name (--xds-server-name): look at its log"},
		{"error reading server preface", preface},
		{"certificate signed by unknown authority", "the server's certificate is not signed by " + rootsOf(cfg) + " (XDS_ROOT_CA, --xds-root-ca)"},
		{"certificate is valid for ", "the expected name is --xds-server-name"},
		{"certificate is not valid for any names", "the expected name is --xds-server-name"},
		{"certificate has expired or is not yet valid", "look at the clock of this host and at the server's certificate"},
	} {
		if strings.Contains(text, known.text) {
			return known.advice
		}
	}
	return ""
}

// rootsOf describes the root certificates in use.
func rootsOf(cfg Config) string {
	if cfg.RootCA == "" {
		return "the system's root certificates"
	}
	return "a certificate in " + cfg.RootCA
}

// tokenAdvice returns the advice for a server that did not authenticate the client.
func tokenAdvice(cfg Config) string {
	switch {
	case cfg.Plaintext:
		return "without TLS no token is sent: leave out --xds-plaintext"
	case cfg.TokenFile == "" && cfg.CertFile != "":
		return "the client certificate in " + cfg.CertFile + " (--xds-cert) was refused, and no token was sent (--xds-token-file)"
	case cfg.TokenFile == "":
		return "no token was sent, since --xds-token-file is empty"
	}
	if token, err := readToken(cfg); err == nil {
		if err := checkToken(cfg, token); err != nil {
			return err.Error()
		}
	}
	refused := "the token in " + cfg.TokenFile + " (--xds-token-file) was refused; istiod wants the audience istio-ca"
	if cfg.Node.ClusterID != defaultClusterID { // see readCredentials
		refused += fmt.Sprintf(" and must know the cluster %q (--cluster-id)", cfg.Node.ClusterID)
	}
	return refused
}
