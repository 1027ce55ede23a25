package discovery

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

const (
	defaultGRPCAddr         = "localhost:15010"
	defaultClusterDomain    = "cluster.local"
	defaultServiceExportTo  = "*"
	defaultTokenAudience    = "istio-ca"
	defaultMaxClients       = 20000
	defaultMaxPerAddress    = 250
	defaultClusterTimeout   = 20 * time.Second
	defaultAckTimeout       = 2 * time.Minute
	defaultMaxConnectionAge = 30 * time.Minute
	defaultDebounce         = 30 * time.Millisecond
)

// Config configures a [Server].
type Config struct {
	// ConfigDir is the directory of objects. It must exist when the server starts. "" means that no directory is read.
	ConfigDir string
	// Kubernetes is the API server whose objects are read, see package clusters; nil means that no API server is
	// read. If the directory and the API server have the same object, the object in the directory is used.
	Kubernetes source.API
	// GRPCAddr is the "host:port" on which ADS is served in plaintext, to everyone. Port 0 means a
	// free port. "" means that ADS is not served in plaintext.
	GRPCAddr string
	// TLSAddr is the "host:port" on which ADS is served over TLS, to clients that prove their
	// identity. "" means that ADS is not served over TLS.
	TLSAddr string
	// TLS are the files with the server's certificate, and with the authorities of clients' certificates.
	TLS auth.Files
	// Certificate is true if the caller has a listener of its own that needs the certificate of the server.
	Certificate bool
	// TokenAudience is the audience of clients' tokens, which the Kubernetes API reviews; ""
	// means "istio-ca".
	TokenAudience string
	// TrustDomain is the domain of clients' certificates; "" means ClusterDomain.
	TrustDomain string
	// ClusterID is the name of the own cluster. A client whose token is from the own cluster must not claim to be in
	// another cluster. If ClusterID is "", it may claim any cluster.
	ClusterID string
	// Identity names this replica in the state of clients; "" means the name of the machine.
	Identity string
	// ClusterDomain is the domain of Services; "" means "cluster.local".
	ClusterDomain string
	// RootNamespace is a namespace at the API server. It has the ConfigMap with the settings of the mesh, and the default
	// Sidecar unless these settings name another namespace. "" means "istio-system".
	RootNamespace string
	// ClustersNamespace is a namespace at the API server. Its Secrets have the kubeconfigs of other clusters, and the
	// hosts of these clusters are served, too. "" means that there are no other clusters.
	ClustersNamespace string
	// ClusterTimeout is how long another cluster that cannot be read keeps the server from being
	// ready. 0 means 20 s.
	ClusterTimeout time.Duration
	// AllowEmpty permits a directory without any object, and files that have lost their objects. If it is false, the
	// server is not ready before it has an object, and keeps the last good objects of a file or a directory that becomes
	// empty.
	AllowEmpty bool
	// Debounce is how long changes are collected before they are served. 0 means 30 ms.
	Debounce time.Duration
	// MaxClients bounds the connections, each of which has one stream at a time. 0 means 20,000.
	MaxClients int
	// MaxClientsPerAddress bounds the connections of clients at one IP address, those included that began within a
	// minute. 0 means 250.
	MaxClientsPerAddress int
	// MemoryLimit is the number of bytes that the process may use. Clients are refused while the process uses nearly all
	// of them. 0 means that there is no limit.
	MemoryLimit int64
	// AckTimeout is how long a client may take to acknowledge a push before the server
	// ends its stream. 0 means 2 minutes.
	AckTimeout time.Duration
	// MaxConnectionAge is the age, give or take a tenth, at which the client of a
	// connection is asked to connect again. 0 means 30 minutes.
	MaxConnectionAge time.Duration
	// Logger is for logs; nil discards them.
	Logger *slog.Logger
	// Registerer is for the metrics; nil means that they are not registered.
	Registerer prometheus.Registerer
}

// DefaultConfig returns the Config of nametap-discovery without flags. It has no source of objects.
func DefaultConfig() Config {
	return Config{GRPCAddr: defaultGRPCAddr}.withDefaults()
}

// withDefaults returns c with defaults for the zero values. Negative values count as zero.
func (c Config) withDefaults() Config {
	if c.Identity == "" {
		c.Identity, _ = os.Hostname()
	}
	c.ClusterDomain = cmp.Or(c.ClusterDomain, defaultClusterDomain)
	c.RootNamespace = cmp.Or(c.RootNamespace, object.DefaultRootNamespace)
	c.TokenAudience = cmp.Or(c.TokenAudience, defaultTokenAudience)
	c.TrustDomain = cmp.Or(c.TrustDomain, c.ClusterDomain)
	c.ClusterTimeout = cmp.Or(max(c.ClusterTimeout, 0), defaultClusterTimeout)
	c.Debounce = cmp.Or(max(c.Debounce, 0), defaultDebounce)
	c.MaxClients = cmp.Or(max(c.MaxClients, 0), defaultMaxClients)
	c.MaxClientsPerAddress = cmp.Or(max(c.MaxClientsPerAddress, 0), defaultMaxPerAddress)
	c.AckTimeout = cmp.Or(max(c.AckTimeout, 0), defaultAckTimeout)
	c.MaxConnectionAge = cmp.Or(max(c.MaxConnectionAge, 0), defaultMaxConnectionAge)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) validate() error {
	if c.ConfigDir == "" && c.Kubernetes == nil {
		return errors.New("no source of objects: name the directory with your Services and ServiceEntries (--config-dir), " +
			"or the file with the access to the Kubernetes API (--kubeconfig)")
	}
	if !object.IsHost(c.ClusterDomain) || object.IsWildcard(c.ClusterDomain) {
		return fmt.Errorf("cluster domain %q: want a DNS name such as %s (--cluster-domain)", c.ClusterDomain, defaultClusterDomain)
	}
	if c.ClustersNamespace != "" && c.Kubernetes == nil {
		return errors.New("the Secrets of other clusters are at the Kubernetes API: name the file with the access to it (--kubeconfig), or no namespace (--clusters-namespace)")
	}
	if !object.IsLabel(c.RootNamespace) {
		return fmt.Errorf("root namespace %q: want a name such as %s (--root-namespace)", c.RootNamespace, object.DefaultRootNamespace)
	}
	return nil
}

// newCertificate returns the certificate of the server; nil if nothing is served over TLS.
func (c Config) newCertificate() (*auth.Server, error) {
	if c.TLSAddr == "" && !c.Certificate {
		return nil, nil //nolint:nilnil // documented
	}
	if c.TLS.Certificate == "" || c.TLS.Key == "" {
		return nil, errors.New("TLS needs a certificate and its key: set --tls-cert and --tls-key")
	}
	return auth.NewServer(c.TLS, c.Logger)
}

// newHosts returns Hosts for a number of sources, without any host.
func (c Config) newHosts(sources int) *hosts.Hosts {
	h := hosts.New(c.ClusterDomain, sources)
	h.SetDefaults(object.Mesh{RootNamespace: c.RootNamespace, ExportTo: []string{defaultServiceExportTo}})
	return h
}
