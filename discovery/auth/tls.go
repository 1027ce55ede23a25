package auth

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
)

// Files are the files of a TLS server, in PEM.
type Files struct {
	// Certificate and Key belong to the server; "" if the certificate is not in files.
	Certificate, Key string
	// ClientCA has the authorities of clients' certificates. "" means that clients' certificates are not requested.
	ClientCA string
}

// checkEvery bounds how often the files are checked for changes. They are checked when a connection comes.
const checkEvery = time.Second

// GetCertificate returns the certificate for a connection, as [tls.Config.GetCertificate] does.
type GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error)

// A Server makes the configuration of TLS connections, from files that may change. Its methods are safe for concurrent
// use.
type Server struct {
	files  Files
	shared GetCertificate // instead of Files.Certificate; nil if the certificate is in files
	log    *slog.Logger

	mu        sync.Mutex
	config    *tls.Config // from the last usable content of the files
	fileState string      // state of the files when they were last read
	checked   time.Time
}

// NewServer returns a server whose files may be replaced while it runs. New connections get the new content; open
// connections stay as they are. While the files cannot be used, their previous content stays in
// use. If shared is not nil, it supplies the certificate.
func NewServer(files Files, shared GetCertificate, log *slog.Logger) (*Server, error) {
	s := &Server{files: files, shared: shared, log: log}
	seen := s.state()
	config, err := s.load()
	if err != nil {
		return nil, err
	}
	s.config, s.fileState, s.checked = config, seen, time.Now()
	return s, nil
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
func (s *Server) Certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return s.current().GetCertificate(hello)
}

// Expires returns when the certificate expires; the zero time if there is none.
func (s *Server) Expires() time.Time {
	certificate, err := s.Certificate(nil)
	if err != nil {
		return time.Time{}
	}
	return certificate.Leaf.NotAfter
}

// current returns the configuration for a connection that begins now.
func (s *Server) current() *tls.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.checked) < checkEvery {
		return s.config
	}
	s.checked = time.Now()
	seen := s.state()
	if seen == s.fileState {
		return s.config
	}
	s.fileState = seen
	config, err := s.load()
	if err != nil {
		s.log.Error("the previous TLS certificate stays in use", "error", err)
		return s.config
	}
	s.config = config
	s.log.Info("TLS files have changed", "certificate", s.files.Certificate, "client_ca", s.files.ClientCA)
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
	config := &tls.Config{GetCertificate: s.shared, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
	if s.shared == nil {
		pair, err := tls.LoadX509KeyPair(s.files.Certificate, s.files.Key)
		if err != nil {
			return nil, fmt.Errorf("certificate %q and key %q: %w (--tls-cert, --tls-key)", s.files.Certificate, s.files.Key, err)
		}
		config.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &pair, nil }
	}
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
