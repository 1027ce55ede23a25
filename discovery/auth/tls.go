package auth

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
)

// Files are the files of a TLS server, in PEM.
type Files struct {
	Certificate, Key string
	// ClientCA holds the authorities of clients' certificates; without it clients have none.
	ClientCA string
}

// checkEvery is how often files are looked at, when connections come.
const checkEvery = time.Second

// A server makes the configuration of TLS connections, from files that change.
type server struct {
	files Files
	log   *slog.Logger

	mu      sync.Mutex
	config  *tls.Config // of the files as they last could be used
	seen    string      // state of the files when they were last read
	checked time.Time
}

// ServerConfig returns the configuration of a server whose files may be replaced while it runs: new
// connections get what is in the files, and open ones stay. While the files cannot be used, their
// previous content stays in use.
func ServerConfig(files Files, log *slog.Logger) (*tls.Config, error) {
	s := &server{files: files, log: log}
	seen := s.state()
	config, err := s.load()
	if err != nil {
		return nil, err
	}
	s.config, s.seen, s.checked = config, seen, time.Now()
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return s.current(), nil },
	}, nil
}

// current returns the configuration for a connection that begins now.
func (s *server) current() *tls.Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.checked) < checkEvery {
		return s.config
	}
	s.checked = time.Now()
	seen := s.state()
	if seen == s.seen {
		return s.config
	}
	s.seen = seen
	config, err := s.load()
	if err != nil {
		s.log.Error("the previous TLS certificate stays in use", "error", err)
		return s.config
	}
	s.config = config
	s.log.Info("TLS files have changed", "certificate", s.files.Certificate, "expires", config.Certificates[0].Leaf.NotAfter)
	return s.config
}

// state returns a text that differs when a file was replaced or written.
func (s *server) state() string {
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
func (s *server) load() (*tls.Config, error) {
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
		return nil, fmt.Errorf("authorities of clients %q: %w (--tls-client-ca)", s.files.ClientCA, errors.New("no certificate in PEM"))
	}
	config.ClientAuth = tls.VerifyClientCertIfGiven
	return config, nil
}
