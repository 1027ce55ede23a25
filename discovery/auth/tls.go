package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/logonce"
)

// Files are the files of a TLS server, in PEM.
type Files struct {
	// Certificate and Key belong to the server.
	Certificate, Key string
	// ClientCA has the authorities of clients' certificates. "" means that clients' certificates are not requested.
	ClientCA string
}

// checkEvery is how often the files, and the certificate's time, are checked.
const checkEvery = time.Second

// A Server makes the configuration of TLS connections, from files that may change. Its methods are safe for concurrent
// use; call Run once.
type Server struct {
	files Files
	log   *slog.Logger
	valid chan struct{} // closed when the certificate is valid for the first time

	// The fields below are owned by Run.
	fileState string          // state of the files that config was read from
	unusable  logonce.Failure // why the files cannot replace config
	invalid   logonce.Failure // why clients cannot use the certificate

	mu      sync.Mutex
	config  *tls.Config // from the last usable content of the files
	problem error       // why clients cannot use the certificate; nil if they can
}

// NewServer reads the files.
func NewServer(files Files, log *slog.Logger) (*Server, error) {
	s := &Server{files: files, log: log, valid: make(chan struct{})}
	s.fileState = s.state()
	config, err := s.load()
	if err != nil {
		return nil, err
	}
	s.config, s.problem = config, s.lifetime(config, time.Now())
	if s.problem == nil {
		close(s.valid)
	}
	return s, nil
}

// Run follows the files until ctx ends. New connections get the new content; open connections stay as they are. While
// the files cannot be used, or their certificate is not valid but the current one is, the current content stays in use.
func (s *Server) Run(ctx context.Context) {
	ticker := time.NewTicker(checkEvery)
	defer ticker.Stop()
	for {
		s.check(time.Now())
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// check reads the files if they have changed, and logs what is wrong with them and with the certificate in use.
func (s *Server) check(now time.Time) {
	s.mu.Lock()
	config := s.config
	s.mu.Unlock()
	invalid, unusable := s.lifetime(config, now), error(nil)
	if seen := s.state(); seen != s.fileState {
		next, err := s.load()
		if err == nil && invalid == nil {
			err = s.lifetime(next, now)
		}
		if unusable = err; err == nil {
			config, invalid, s.fileState = next, s.lifetime(next, now), seen
			s.log.Info("TLS files have changed", "certificate", s.files.Certificate, "client_ca", s.files.ClientCA, "expires", leaf(next).NotAfter)
		}
	}
	if s.unusable.Differs(unusable) {
		s.log.Error("the previous TLS certificate stays in use", "error", unusable)
	}
	if s.invalid.Differs(invalid) {
		s.log.Error("no client can connect over TLS", "error", invalid)
	}
	if invalid == nil && !chans.Closed(s.valid) {
		close(s.valid)
	}
	s.mu.Lock()
	s.config, s.problem = config, invalid
	s.mu.Unlock()
}

// lifetime returns an error if the certificate of a configuration has expired, or is not valid yet.
func (s *Server) lifetime(config *tls.Config, now time.Time) error {
	switch certificate := leaf(config); {
	case now.After(certificate.NotAfter):
		return fmt.Errorf("the certificate in %q has expired at %s: renew it (--tls-cert)", s.files.Certificate, certificate.NotAfter.UTC().Format(time.RFC3339))
	case now.Before(certificate.NotBefore):
		return fmt.Errorf("the certificate in %q is not valid before %s: set the clock of this machine, or of the one that made it (--tls-cert)", s.files.Certificate, certificate.NotBefore.UTC().Format(time.RFC3339))
	}
	return nil
}

// leaf returns the certificate of the server in a configuration that load has returned.
func leaf(config *tls.Config) *x509.Certificate { return config.Certificates[0].Leaf }

// Valid returns a channel that is closed when the certificate is valid for the first time.
func (s *Server) Valid() <-chan struct{} { return s.valid }

// Problem returns an error if clients cannot use the certificate: it has expired, or is not valid yet.
func (s *Server) Problem() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problem
}

// Config returns the configuration of TLS.
func (s *Server) Config() *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.current(), nil },
	}
}

// Certificate returns the certificate for a connection that begins now. It has the form of
// [tls.Config.GetCertificate].
func (s *Server) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return &s.current().Certificates[0], nil
}

// Expires returns when the certificate expires.
func (s *Server) Expires() time.Time { return leaf(s.current()).NotAfter }

// current returns the configuration for a connection that begins now.
func (s *Server) current() *tls.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.config
}

// state returns a text that changes when a file is replaced or written.
func (s *Server) state() string {
	var state strings.Builder
	for _, path := range []string{s.files.Certificate, s.files.Key, s.files.ClientCA} {
		if path == "" {
			continue
		}
		info, err := os.Stat(path)
		if err != nil {
			fmt.Fprintln(&state, err)
			continue
		}
		fmt.Fprintln(&state, path, info.Size(), info.ModTime().UnixNano())
	}
	return state.String()
}

// load reads the files.
func (s *Server) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(s.files.Certificate, s.files.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate %q and key %q: %w (--tls-cert, --tls-key)", s.files.Certificate, s.files.Key, err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
	if s.files.ClientCA == "" {
		return config, nil
	}
	text, err := os.ReadFile(s.files.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("authorities of clients: %w (--tls-client-ca)", err)
	}
	config.ClientCAs = x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("authorities of clients %q: no certificate in PEM (--tls-client-ca)", s.files.ClientCA)
	}
	config.ClientAuth = tls.VerifyClientCertIfGiven
	return config, nil
}
