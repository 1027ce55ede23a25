package nds

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// certificateRefused reports whether err is an alert by which a server says that it does
// not take our client certificate, or wants one. Other alerts are about the server.
func certificateRefused(err error) bool {
	if err == nil {
		return false
	}
	_, alert, found := strings.Cut(err.Error(), "remote error: tls: ")
	if !found {
		return false
	}
	for _, about := range []string{"certificate", "access denied", "handshake failure"} {
		if strings.Contains(alert, about) {
			return true
		}
	}
	return false
}

// advise adds to err the setting to look at, if err is known to come from one. addr is
// what was connected to, by the setting addrFlag.
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
		return refusedProof(cfg)
	case codes.PermissionDenied:
		return fmt.Sprintf("the token or certificate must be for namespace %q (--namespace) and service account %q (--service-account)",
			cfg.Node.Namespace, cfg.Node.ServiceAccount)
	default:
	}
	if certificateRefused(err) {
		return "the server wants another client certificate, or one at all (--xds-cert, --workload-cert)"
	}
	text := err.Error()
	for _, known := range []struct{ text, advice string }{
		{"first record does not look like a TLS handshake", "the server does not speak TLS: --xds-plaintext, or another port (" + addrFlag + ")"},
		{"remote error: tls: ", "the server ends TLS handshakes: look at its log, and whether --xds-server-name is a name of it"},
		{"error reading server preface", plaintextAdvice(cfg, addrFlag)},
		{"certificate signed by unknown authority", "the server's certificate does not lead to " + rootsOf(cfg) + " (XDS_ROOT_CA, --xds-root-ca)"},
		{"certificate is valid for ", "the expected name is --xds-server-name"},
		{"certificate is not valid for any names", "the expected name is --xds-server-name"},
		{"certificate has expired or is not yet valid", "look at the clock of this host and at the server's certificate"},
		{"connection refused", nothingThere(addr, addrFlag)},
		{"no such host", nothingThere(addr, addrFlag)},
		{"network is unreachable", nothingThere(addr, addrFlag)},
		{"no route to host", nothingThere(addr, addrFlag)},
		{"i/o timeout", nothingThere(addr, addrFlag)},
	} {
		if strings.Contains(text, known.text) {
			return known.advice
		}
	}
	return ""
}

// plaintextAdvice is for a server that does not speak HTTP/2 to us.
func plaintextAdvice(cfg Config, addrFlag string) string {
	if !cfg.Plaintext {
		return ""
	}
	return "if the server wants TLS, leave out --xds-plaintext, or use another port (" + addrFlag + ")"
}

// nothingThere is for an address where no server was reached.
func nothingThere(addr, addrFlag string) string {
	return fmt.Sprintf("is there a server at %s (%s)?", addr, addrFlag)
}

// rootsOf names the root certificates in use.
func rootsOf(cfg Config) string {
	if cfg.RootCA == "" {
		return "the system's root certificates"
	}
	return "those in " + cfg.RootCA
}

// refusedProof says what proof of identity was refused.
func refusedProof(cfg Config) string {
	switch {
	case cfg.Plaintext:
		return "without TLS no token is sent: leave out --xds-plaintext"
	case cfg.TokenFile == "":
		return "no token was sent, since --xds-token-file is empty"
	}
	token, err := readToken(cfg.TokenFile)
	if err == nil && expired(token) {
		expires, _ := expiry(token)
		return fmt.Sprintf("the token in %s (--xds-token-file) has expired at %s: put a new one there", cfg.TokenFile, expires.Format(time.RFC3339))
	}
	return "the token in " + cfg.TokenFile + " (--xds-token-file) was refused; istiod wants the audience istio-ca"
}
