package nds

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	defaultServerName   = "istiod.istio-system.svc"
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
	// TokenFile holds the bearer token; "" means none. It is read on every
	// connect, since Kubernetes replaces it while we run.
	TokenFile string
	// ServerName is the name the control plane's certificate must have; ""
	// means istiod.istio-system.svc.
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
	// StateDir is an existing directory for the snapshot of the table; "" means
	// that there is none. Only one client may use a directory.
	StateDir string
	// Logger takes what happens; nil means that nothing is logged.
	Logger *slog.Logger
	// Registerer takes the metrics; nil means that there are none.
	Registerer prometheus.Registerer
}

// withDefaults returns c with the zero values replaced by what they mean, or
// says which field is wrong.
func (c Config) withDefaults() (Config, error) {
	if err := checkAddr(c.Addr); err != nil {
		return c, err
	}
	if c.Variant != Incremental && c.Variant != StateOfTheWorld {
		return c, fmt.Errorf("ADS variant %d: want Incremental or StateOfTheWorld", int(c.Variant))
	}
	if c.MaxPushBytes < 0 {
		return c, fmt.Errorf("longest push of %d bytes: want a positive number, or 0 for %d", c.MaxPushBytes, defaultMaxPushBytes)
	}
	node, err := c.Node.withDefaults()
	if err != nil {
		return c, err
	}
	c.Node = node
	if c.ServerName == "" {
		c.ServerName = defaultServerName
	}
	if c.MaxPushBytes == 0 {
		c.MaxPushBytes = defaultMaxPushBytes
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// checkAddr refuses what cannot be a host and a port, so that a typing error
// ends the process and is not tried again for ever.
func checkAddr(addr string) error {
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
		return fmt.Errorf("control plane address %q: want host:port, for example istiod.istio-system.svc:15012: %w", addr, err)
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

// ParseVariant reads "incremental" or "sotw".
func ParseVariant(s string) (Variant, error) {
	for _, v := range []Variant{Incremental, StateOfTheWorld} {
		if s == v.String() {
			return v, nil
		}
	}
	return 0, fmt.Errorf("ADS variant %q: want incremental or sotw", s)
}

// String returns the form that [ParseVariant] reads.
func (v Variant) String() string {
	switch v {
	case Incremental:
		return "incremental"
	case StateOfTheWorld:
		return "sotw"
	}
	return "Variant(" + strconv.Itoa(int(v)) + ")"
}
