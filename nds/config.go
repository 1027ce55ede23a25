package nds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/internal/clock"
)

const (
	defaultServerName  = "istiod.istio-system.svc"
	defaultTrustDomain = "cluster.local"
	// maxPushBytes bounds the length of a response. A host takes 67 to 81 bytes.
	maxPushBytes = 64 << 20
)

// Config configures a [Client].
type Config struct {
	// Addr is the control plane's host and port. The host is looked up on every connect.
	Addr string
	// Resolver looks up the host of Addr; nil means the system's resolver.
	Resolver *net.Resolver
	// Dial connects to addr, a host and port. nil means a TCP connection that uses Resolver, with keep-alives that
	// notice a dead host within 25 s.
	Dial func(ctx context.Context, addr string) (net.Conn, error)
	// Plaintext connects without TLS. The client then sends no token and ignores the
	// other TLS settings.
	Plaintext bool
	// RootCA is a PEM file with the root certificates for the control plane's
	// certificate. It is read on every connect. "" means the system's root certificates,
	// which Go reads once per process.
	RootCA string
	// RootCAFallback is read if RootCA does not exist; "" means none.
	RootCAFallback string
	// TokenFile holds the bearer token; "" means none. It is read on every connect,
	// because Kubernetes replaces it.
	TokenFile string
	// CertFile and KeyFile hold a client certificate with its chain, and its key, in PEM;
	// both may be "". They are read on every connect.
	CertFile, KeyFile string
	// WorkloadCert says whether the token is exchanged for a workload certificate;
	// "" means WorkloadCertAuto.
	WorkloadCert WorkloadCert
	// CAAddr is the host and port of the certificate authority; "" means Addr.
	CAAddr string
	// TrustDomain is the trust domain of the workload's SPIFFE identity; "" means
	// cluster.local.
	TrustDomain string
	// ServerName is the name that the control plane's certificate must have; "" means the
	// host of Addr, or istiod.istio-system.svc if that host is an IP address or localhost.
	ServerName string
	// Node describes the workload.
	Node Node
	// Refresh is called with Node and returns it with the current addresses and labels. It is called for every
	// connect. Between two connects it is called about every 10 s, and after a signal on Changed. If the result
	// changes, the client connects again. nil means that the node never changes.
	Refresh func(Node) (Node, error)
	// Changed receives a value when the result of Refresh may have changed. It may be nil. While a value waits to
	// be received, the sender may drop further values.
	Changed <-chan struct{}
	// Handled is called after each response was applied or rejected, and at the end of each connection. The memory
	// for the response or the connection is no longer needed then, so the caller can return it to the system. nil
	// means that nothing is called.
	Handled func()
	// StateDir is a directory for the snapshot of the table and the workload certificate; "" means that neither is
	// saved. It is created if it does not exist. If several clients have the same directory, only one of them uses
	// it.
	StateDir string
	// MaxTable is how many bytes the entries of the table may have; 0 means 64 MiB. A push with which they would have
	// more is rejected. With more than 512 resources, each further one counts as 256 bytes more.
	MaxTable int
	// Clock measures the age of the table and the time for which the machine was suspended; nil means clock.New().
	Clock *clock.Clock
	// Logger receives the logs; nil discards them.
	Logger *slog.Logger
	// Registerer is for the metrics; nil means that they are not registered.
	Registerer prometheus.Registerer
}

// DefaultConfig returns a Config with the addresses, files and names that Istio's agent
// uses in a pod. It lacks the pod's name and IP addresses.
func DefaultConfig() Config {
	return Config{
		Addr:         defaultServerName + ":15012",
		RootCA:       "/var/run/secrets/istio/root-cert.pem",
		TokenFile:    "/var/run/secrets/tokens/istio-token",
		WorkloadCert: WorkloadCertAuto,
		TrustDomain:  defaultTrustDomain,
		Node:         Node{Namespace: "default", ClusterID: defaultClusterID, ServiceAccount: "default"},
		StateDir:     "/var/lib/nametap",
	}
}

// Validate returns an error if a setting is wrong. [New] returns the same error.
func (c Config) Validate() error {
	_, err := c.withDefaults()
	return err
}

// withDefaults returns c with defaults for the zero values, or an error that names the
// invalid field.
func (c Config) withDefaults() (Config, error) {
	if err := checkAddr("control plane", "--xds-addr", c.Addr); err != nil {
		return c, err
	}
	if err := c.checkCertificates(); err != nil {
		return c, err
	}
	c.CAAddr = cmp.Or(c.CAAddr, c.Addr)
	node, err := c.Node.withDefaults()
	if err != nil {
		return c, err
	}
	if _, err := node.proto(); err != nil {
		return c, err
	}
	c.Node = node
	c.ServerName = cmp.Or(c.ServerName, serverName(c.Addr))
	c.TrustDomain = cmp.Or(c.TrustDomain, defaultTrustDomain)
	c.MaxTable = cmp.Or(c.MaxTable, maxPushBytes)
	if c.Clock == nil {
		c.Clock = clock.New()
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Handled == nil {
		c.Handled = func() {}
	}
	return c, nil
}

// checkCertificates returns an error if the settings of certificates are invalid.
func (c Config) checkCertificates() error {
	if (c.CertFile == "") != (c.KeyFile == "") {
		return fmt.Errorf("client certificate %q with key %q: want both files or none (--xds-cert, --xds-key)", c.CertFile, c.KeyFile)
	}
	if !slices.Contains([]WorkloadCert{"", WorkloadCertAuto, WorkloadCertOn, WorkloadCertOff}, c.WorkloadCert) {
		return fmt.Errorf("workload certificate %q: want auto, on or off", c.WorkloadCert)
	}
	if c.CAAddr == "" {
		return nil
	}
	return checkAddr("certificate authority", "--ca-addr", c.CAAddr)
}

// serverName returns the name that the certificate of the server at addr must have by default.
func serverName(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if _, notAddress := netip.ParseAddr(host); err != nil || notAddress == nil || host == "localhost" {
		return defaultServerName
	}
	return host
}

// caServerName returns the name that the certificate authority's certificate must have.
func (c Config) caServerName() string {
	if c.CAAddr == c.Addr {
		return c.ServerName
	}
	return serverName(c.CAAddr)
}

// checkAddr returns an error unless addr is a host and a port. So a typing error is reported at the start, not at
// every connect. server describes the server, and flag is the flag that sets addr.
func checkAddr(server, flag, addr string) error {
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
		return fmt.Errorf("%s address %q: want host:port, for example istiod.istio-system.svc:15012: %w (%s)", server, addr, err, flag)
	}
	return nil
}

// WorkloadCert says whether the token is exchanged for a workload certificate.
type WorkloadCert string

const (
	// WorkloadCertAuto exchanges the token unless kubelet renews it or a client
	// certificate is configured. The zero value means the same.
	WorkloadCertAuto WorkloadCert = "auto"
	// WorkloadCertOn always exchanges the token.
	WorkloadCertOn WorkloadCert = "on"
	// WorkloadCertOff never exchanges the token.
	WorkloadCertOff WorkloadCert = "off"
)
