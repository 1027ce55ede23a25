package nds

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// connectionCredentials are what one connection is made with.
type connectionCredentials struct {
	options []grpc.DialOption
	// workload is the workload certificate that is shown; nil if it is another one
	// or none.
	workload *tls.Certificate
}

// readCredentials reads the files that cfg names and returns what they say. It is
// called for every connection, so that a replaced file is used by the next one.
// workload may be nil. With a certificate the token may be missing or expired.
func readCredentials(cfg Config, workload *tls.Certificate, serverName string) (connectionCredentials, error) {
	var c connectionCredentials
	if cfg.Plaintext {
		c.options = append(c.options, grpc.WithTransportCredentials(insecure.NewCredentials()))
		return c, nil
	}
	tlsConfig := &tls.Config{ServerName: serverName, MinVersion: tls.VersionTLS12}
	var err error
	if tlsConfig.RootCAs, err = readRoots(cfg.RootCA, cfg.RootCAElse); err != nil {
		return c, fmt.Errorf("reading root certificates (XDS_ROOT_CA, --xds-root-ca): %w", err)
	}
	certificate := workload
	if cfg.CertFile != "" {
		pair, err := tls.LoadX509KeyPair(cfg.CertFile, cfg.KeyFile)
		if err != nil {
			return c, fmt.Errorf("reading the client certificate (--xds-cert, --xds-key): %w", err)
		}
		certificate = &pair
	} else {
		c.workload = workload
	}
	if certificate != nil {
		// Shown to any server that asks: one that does not take it is to say so.
		tlsConfig.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return certificate, nil
		}
	}
	c.options = append(c.options, grpc.WithTransportCredentials(credentials.NewTLS(tlsConfig)))
	if cfg.TokenFile == "" {
		return c, nil
	}
	token, err := readToken(cfg.TokenFile)
	if certificate != nil && (err != nil || expired(token)) {
		// A server that looks at the token first would refuse it.
		return c, nil //nolint:nilerr // the certificate is enough
	}
	if err != nil {
		return c, fmt.Errorf("reading the token (--xds-token-file): %w", err)
	}
	header := bearer{"authorization": "Bearer " + token}
	if cfg.Node.ClusterID != defaultClusterID {
		// istiod asks the API server of this cluster whether the token is good, its
		// own one if there is no header. A cluster that it does not know is refused,
		// so the default, which may be wrong, is not sent.
		header["clusterid"] = cfg.Node.ClusterID
	}
	c.options = append(c.options, grpc.WithPerRPCCredentials(header))
	return c, nil
}

// readRoots returns the certificates of a PEM file, or of another one if that does not
// exist, or nil, which means the system's, for no file.
func readRoots(file, other string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil //nolint:nilnil // documented
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) && other != "" {
		if found, otherErr := os.ReadFile(other); otherErr == nil {
			file, text, err = other, found, nil
		}
	}
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("no certificate in %q, want PEM", file)
	}
	return pool, nil
}

// goodToken reports whether a file, which may be "", holds a token that is not known to
// have expired.
func goodToken(file string) bool {
	if file == "" {
		return false
	}
	token, err := readToken(file)
	return err == nil && !expired(token)
}

// expired reports whether a token is known to have expired.
func expired(token string) bool {
	expires, dated := expiry(token)
	return dated && time.Now().After(expires)
}

// expiry returns when a token expires, if it is a JSON Web Token that says so. The
// signature is for the control plane to check.
func expiry(token string) (expires time.Time, dated bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Expires float64 `json:"exp"`
	}
	if json.Unmarshal(payload, &claims) != nil || claims.Expires <= 0 {
		return time.Time{}, false
	}
	return time.Unix(int64(claims.Expires), 0), true
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

// bearer is the headers that prove the node's identity; it implements
// [credentials.PerRPCCredentials].
type bearer map[string]string

// GetRequestMetadata returns the headers.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return b, nil
}

// RequireTransportSecurity keeps the token off plaintext connections.
func (b bearer) RequireTransportSecurity() bool { return true }
