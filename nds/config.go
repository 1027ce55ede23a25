package nds

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	defaultServerName   = "istiod.istio-system.svc"
	defaultTrustDomain  = "cluster.local"
	defaultMaxPushBytes = 64 << 20
)

// Config says which control plane a [Client] talks to, and as whom.
type Config struct {
	// Addr is the control plane's host and port. The host is looked up again on
	// every connect.
	Addr string
	// Plaintext connects without TLS. No token is sent then, and the other TLS
	// settings are not looked at.
	Plaintext bool
	// RootCA is a PEM file with the root certificates that the control plane's
	// certificate must lead to; "" means the system's. It is read on every
	// connect.
	RootCA string
	// RootCAElse is the file that is read if RootCA does not exist; "" means none.
	RootCAElse string
	// TokenFile holds the bearer token; "" means none. It is read on every
	// connect, since Kubernetes replaces it while we run.
	TokenFile string
	// CertFile and KeyFile hold a client certificate with its chain, and its key,
	// PEM; both may be "". They are read on every connect.
	CertFile, KeyFile string
	// WorkloadCert says when the token is exchanged for a workload certificate;
	// "" means WorkloadCertAuto.
	WorkloadCert WorkloadCert
	// CAAddr is the host and port of the certificate authority; "" means Addr.
	CAAddr string
	// TrustDomain is that of the workload's SPIFFE identity; "" means cluster.local.
	TrustDomain string
	// ServerName is the name the control plane's certificate must have; "" means
	// the host of Addr, or istiod.istio-system.svc if that is an address or localhost.
	ServerName string
	// Variant is the ADS variant to start with.
	Variant Variant
	// Node is what the control plane is told of the workload.
	Node Node
	// Refresh returns a node, which is Node at first, with the addresses and labels
	// that the workload has now. It is called for every connect and, while a stream
	// stands, every 10 s and after Changed; another result makes the client connect
	// again. nil means that the node never changes.
	Refresh func(Node) (Node, error)
	// Changed receives whenever Refresh may have another result. It may be nil, and
	// values that come while one waits may be dropped.
	Changed <-chan struct{}
	// MaxPushBytes bounds a single response; 0 means 64 MiB.
	MaxPushBytes int
	// StateDir is a directory for the snapshot of the table and the workload
	// certificate; it is made if it does not exist; "" means
	// that there is none. Only one client may use a directory.
	StateDir string
	// Logger takes what happens; nil means that nothing is logged.
	Logger *slog.Logger
	// Registerer takes the metrics; nil means that there are none.
	Registerer prometheus.Registerer
}

// DefaultConfig returns a Config with the places and the names that Istio's agent has in a
// pod. It lacks the node's name and addresses.
func DefaultConfig() Config {
	return Config{
		Addr:         defaultServerName + ":15012",
		RootCA:       "/var/run/secrets/istio/root-cert.pem",
		TokenFile:    "/var/run/secrets/tokens/istio-token",
		WorkloadCert: WorkloadCertAuto,
		TrustDomain:  defaultTrustDomain,
		Variant:      Incremental,
		Node:         Node{Namespace: "default", ClusterID: defaultClusterID, ServiceAccount: "default"},
		MaxPushBytes: defaultMaxPushBytes,
		StateDir:     "/var/lib/nametap",
	}
}

// withDefaults returns c with the zero values replaced by what they mean, or
// says which field is wrong.
func (c Config) withDefaults() (Config, error) {
	if err := checkAddr("control plane", c.Addr); err != nil {
		return c, err
	}
	if c.Variant != Incremental && c.Variant != StateOfTheWorld {
		return c, fmt.Errorf("ADS variant %d: want Incremental or StateOfTheWorld", int(c.Variant))
	}
	if c.MaxPushBytes < 0 {
		return c, fmt.Errorf("longest push of %d bytes: want a positive number, or 0 for %d", c.MaxPushBytes, defaultMaxPushBytes)
	}
	if err := c.checkCertificates(); err != nil {
		return c, err
	}
	if c.CAAddr == "" {
		c.CAAddr = c.Addr
	}
	node, err := c.Node.withDefaults()
	if err != nil {
		return c, err
	}
	c.Node = node
	if c.ServerName == "" {
		c.ServerName = serverName(c.Addr)
	}
	if c.TrustDomain == "" {
		c.TrustDomain = defaultTrustDomain
	}
	if c.MaxPushBytes == 0 {
		c.MaxPushBytes = defaultMaxPushBytes
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// checkCertificates refuses settings of certificates that contradict each other.
func (c Config) checkCertificates() error {
	if (c.CertFile == "") != (c.KeyFile == "") {
		return fmt.Errorf("client certificate %q with key %q: want both files or none", c.CertFile, c.KeyFile)
	}
	if c.WorkloadCert != "" {
		if err := new(WorkloadCert).UnmarshalText([]byte(c.WorkloadCert)); err != nil {
			return fmt.Errorf("workload certificate %q: %w", c.WorkloadCert, err)
		}
	}
	if c.CAAddr == "" {
		return nil
	}
	return checkAddr("certificate authority", c.CAAddr)
}

// serverName is the name that the certificate of addr must have if nothing says
// otherwise.
func serverName(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if _, notAddress := netip.ParseAddr(host); err != nil || notAddress == nil || host == "localhost" {
		return defaultServerName
	}
	return host
}

// caServerName is the name that the authority's certificate must have.
func (c Config) caServerName() string {
	if c.CAAddr == c.Addr {
		return c.ServerName
	}
	return serverName(c.CAAddr)
}

// checkAddr refuses what cannot be a host and a port, so that a typing error
// ends the process and is not tried again for ever.
func checkAddr(what, addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err == nil && host == "" {
		err = errors.New("no host")
	}
	if err == nil {
		var n uint64
		if n, err = strconv.ParseUint(port, 10, 16); err == nil && n == 0 {
			err = errors.New("port 0")
		}
	}
	if err != nil {
		return fmt.Errorf("%s address %q: want host:port, for example istiod.istio-system.svc:15012: %w", what, addr, err)
	}
	return nil
}

// Variant is one of the two ways in which ADS sends resources.
type Variant int

const (
	// Incremental sends what changed.
	Incremental Variant = iota
	// StateOfTheWorld sends everything with each push.
	StateOfTheWorld
)

// MarshalText returns what UnmarshalText reads.
func (v Variant) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText reads "incremental" or "sotw". The error says what was expected; the
// caller names the setting and its value.
func (v *Variant) UnmarshalText(text []byte) error {
	for _, known := range []Variant{Incremental, StateOfTheWorld} {
		if string(text) == known.String() {
			*v = known
			return nil
		}
	}
	return errors.New("want incremental or sotw")
}

// String returns the text that UnmarshalText reads.
func (v Variant) String() string {
	switch v {
	case Incremental:
		return "incremental"
	case StateOfTheWorld:
		return "sotw"
	}
	return "Variant(" + strconv.Itoa(int(v)) + ")"
}
