package nds

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// credentialOptions reads the files that cfg names and returns what they say.
// It is called for every connection, so that a replaced file is used by the
// next one.
func credentialOptions(cfg Config) ([]grpc.DialOption, error) {
	if cfg.Plaintext {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, nil
	}
	tlsConfig := &tls.Config{ServerName: cfg.ServerName, MinVersion: tls.VersionTLS12}
	if cfg.RootCA != "" {
		pem, err := os.ReadFile(cfg.RootCA)
		if err != nil {
			return nil, fmt.Errorf("reading root certificates: %w", err)
		}
		tlsConfig.RootCAs = x509.NewCertPool()
		if !tlsConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("reading root certificates: no certificate in %q, want PEM", cfg.RootCA)
		}
	}
	opts := []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig))}
	if cfg.TokenFile == "" {
		return opts, nil
	}
	token, err := readToken(cfg.TokenFile)
	if err != nil {
		return nil, fmt.Errorf("reading token: %w", err)
	}
	header := bearer{"authorization": "Bearer " + token}
	if cfg.Node.ClusterID != defaultClusterID {
		// istiod asks the API server of this cluster whether the token is good,
		// its own one if there is no header. A cluster it does not know is
		// refused, so the default, which may be nobody's choice, is not sent.
		header["clusterid"] = cfg.Node.ClusterID
	}
	return append(opts, grpc.WithPerRPCCredentials(header)), nil
}

// readToken returns the token in a file, without the line break that editors
// leave.
func readToken(file string) (string, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	token := bytes.TrimSpace(data)
	if len(token) == 0 {
		return "", fmt.Errorf("%q is empty", file)
	}
	if bytes.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		// Such bytes may not stand in a header; the token stays out of the log.
		return "", errors.New(file + " holds more than one token")
	}
	return string(token), nil
}

// bearer is the headers that prove who we are; it implements
// [credentials.PerRPCCredentials].
type bearer map[string]string

// GetRequestMetadata returns the headers.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return b, nil
}

// RequireTransportSecurity keeps the token off plaintext connections.
func (b bearer) RequireTransportSecurity() bool { return true }
