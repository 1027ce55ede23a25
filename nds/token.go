package nds

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/nametap/nametap/internal/jwt"
)

// A Token describes the token for the control plane, without the secret.
type Token struct {
	// File is the file with the token; "" if no token is sent.
	File string `json:"file,omitempty"`
	// Issued and Expires are zero if the token does not have these claims.
	Issued  time.Time `json:"issued,omitzero"`
	Expires time.Time `json:"expires,omitzero"`
}

// tokenOf describes the token that cfg names.
func tokenOf(cfg Config) Token {
	if cfg.Plaintext || cfg.TokenFile == "" {
		return Token{}
	}
	found := Token{File: cfg.TokenFile}
	if token, err := readToken(cfg); err == nil {
		found.Issued, found.Expires = jwt.Times(token)
	}
	return found
}

// usableToken reports whether the file that cfg names has a token that is not known to have expired.
func usableToken(cfg Config) bool {
	if cfg.TokenFile == "" {
		return false
	}
	token, err := readToken(cfg)
	return err == nil && checkToken(cfg, token) == nil
}

// readToken returns the token in the file that cfg names, without the newline that editors add.
func readToken(cfg Config) (string, error) {
	file := cfg.TokenFile
	data, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	token := bytes.TrimSpace(data)
	if len(token) == 0 {
		return "", fmt.Errorf("%q is empty", file)
	}
	if bytes.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		// A header cannot hold such bytes. The error does not quote the token, which is
		// secret.
		return "", errors.New(file + " holds more than one token, or bytes that are not printable ASCII")
	}
	return string(token), nil
}

// checkToken returns an error if token, which is in the file that cfg names, is known to have expired.
func checkToken(cfg Config, token string) error {
	_, expires := jwt.Times(token)
	return checkDates("the token in "+cfg.TokenFile+" (--xds-token-file)", time.Time{}, expires)
}

// bearer holds the headers with the bearer token. It implements
// [credentials.PerRPCCredentials].
type bearer map[string]string

// GetRequestMetadata returns the headers.
func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return b, nil
}

// RequireTransportSecurity returns true, which makes gRPC refuse to send the token in plaintext.
func (b bearer) RequireTransportSecurity() bool { return true }
