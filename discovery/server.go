package discovery

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/intake"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/push"
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
	// stopGrace bounds how long streams take to end when the server stops.
	stopGrace = time.Second
)

// Config configures a [Server].
type Config struct {
	// ConfigDir is the directory of objects. It must exist when the server starts, unless
	// StateDir holds the last good objects. "" means that no directory is read.
	ConfigDir string
	// Kubernetes is the API server whose objects are read, see package clusters; nil means that none
	// is. With ConfigDir, an object in the directory is used instead of the same one of the API
	// server.
	Kubernetes source.API
	// GRPCAddr is the "host:port" on which ADS is served in plaintext, to everyone. Port 0 means a
	// free port, "" that it is not.
	GRPCAddr string
	// TLSAddr is the "host:port" on which ADS is served over TLS, to clients that prove their
	// identity. "" means that it is not.
	TLSAddr string
	// TLS are the files of the server's certificate and of the authorities of clients'.
	TLS auth.Files
	// TLSSecret is the Secret of the server's certificate, instead of files; nil for files.
	TLSSecret *TLSSecret
	// Certificate is true if the caller serves something with the certificate of the server, too.
	Certificate bool
	// TokenAudience is the audience of clients' tokens, which the Kubernetes API reviews; ""
	// means "istio-ca".
	TokenAudience string
	// TrustDomain is the domain of clients' certificates; "" means ClusterDomain.
	TrustDomain string
	// ClusterID is what clients may claim as their cluster; "" means anything.
	ClusterID string
	// Lease is that whose holder writes automatic VIPs to the status of ServiceEntries, so that all
	// replicas give a host the same. Without one, none are written.
	Lease source.Lease
	// Identity names this replica in the Lease, and in what is shown of clients; "" means the name of the machine.
	Identity string
	// ClusterDomain is the domain of Services; "" means "cluster.local".
	ClusterDomain string
	// RootNamespace is the namespace of the ConfigMap with the settings of the mesh, at the API server,
	// and of the default Sidecar if these settings name no other; "" means "istio-system".
	RootNamespace string
	// ClustersNamespace is the namespace, at the API server, of the Secrets with kubeconfigs of other
	// clusters, whose hosts are served, too. "" means that there are none.
	ClustersNamespace string
	// ClusterTimeout is how long another cluster that cannot be read keeps the server from being
	// ready. 0 means 20 s.
	ClusterTimeout time.Duration
	// AllowEmpty permits a directory without any object. If it is false, the server is not
	// ready before it has an object, and keeps the last good objects when the directory
	// becomes empty.
	AllowEmpty bool
	// StateDir is the directory in which automatic VIPs and the last good form of all
	// objects are saved. It is created if it does not exist. "" keeps both in memory: after
	// a restart, hosts that prefer the same VIP may exchange it, and a broken object has no
	// last good form.
	StateDir string
	// Debounce is how long changes are collected before they are served. Two reads of the directory, that
	// time apart, must find the same; during continuous edits the tenth is used. 0 means 30 ms.
	Debounce time.Duration
	// MaxClients bounds the streams that are served at a time. 0 means 20,000.
	MaxClients int
	// MaxClientsPerAddress bounds the connections, and the streams, of clients at one IP address at a time, and how
	// many of each may begin within a minute. 0 means 250.
	MaxClientsPerAddress int
	// MemoryLimit is the number of bytes that the process may use. Clients are refused while it uses nearly all of them.
	// 0 means that there is no limit.
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

// DefaultConfig returns the Config of nametap-discovery without flags. The source of objects is
// missing.
func DefaultConfig() Config {
	cfg := Config{StateDir: "/var/lib/nametap-discovery", GRPCAddr: defaultGRPCAddr}
	return cfg.withDefaults()
}

// withDefaults returns c with defaults for the zero values.
func (c Config) withDefaults() Config {
	if c.Identity == "" {
		c.Identity, _ = os.Hostname() // [Server.newWriter] fails without a name
	}
	if c.ClusterDomain == "" {
		c.ClusterDomain = defaultClusterDomain
	}
	if c.RootNamespace == "" {
		c.RootNamespace = object.DefaultRootNamespace
	}
	if c.TokenAudience == "" {
		c.TokenAudience = defaultTokenAudience
	}
	if c.TrustDomain == "" {
		c.TrustDomain = c.ClusterDomain
	}
	if c.ClusterTimeout <= 0 {
		c.ClusterTimeout = defaultClusterTimeout
	}
	if c.Debounce <= 0 {
		c.Debounce = defaultDebounce
	}
	if c.MaxClients <= 0 {
		c.MaxClients = defaultMaxClients
	}
	if c.MaxClientsPerAddress <= 0 {
		c.MaxClientsPerAddress = defaultMaxPerAddress
	}
	if c.AckTimeout <= 0 {
		c.AckTimeout = defaultAckTimeout
	}
	if c.MaxConnectionAge <= 0 {
		c.MaxConnectionAge = defaultMaxConnectionAge
	}
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
	if c.Lease != (source.Lease{}) && c.Kubernetes == nil {
		return errors.New("automatic VIPs are written to objects of the Kubernetes API only: name a file with its access (--kubeconfig), or leave --lease away")
	}
	if !object.IsHost(c.ClusterDomain) {
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

// newHosts returns no hosts of a number of sources. The automatic VIPs are allocated in vips.
func (c Config) newHosts(sources int, vips *hosts.VIPs) *hosts.Hosts {
	h := hosts.New(c.ClusterDomain, sources, vips)
	h.SetDefaults(object.Mesh{RootNamespace: c.RootNamespace, ExportTo: []string{defaultServiceExportTo}})
	return h
}

// Server is the control plane. Make one with [New], and call Run once.
type Server struct {
	cfg     Config
	metrics *metrics
	push    *push.Service
	ready   chan struct{}
	addr    net.Addr // of plaintext, or of TLS if that is all; written before ready is closed
	tlsAddr net.Addr // of TLS, or of plaintext if that is all; written before ready is closed

	identities  *auth.Clients      // nil without TLS
	tls         *auth.Server       // nil without TLS
	certificate source.Certificate // nil without a Secret
	refusals    rate.Sometimes     // logs clients that are refused

	inputs    *inputs
	vips      vips          // owned by the goroutine of follow
	writer    source.Writer // nil without a Lease
	writeVIPs chan struct{} // has an element when VIPs may have to be written

	places *intake.Places // of streams
	unread *intake.Budget // for requests that were not read
	memory *memoryLimit

	*report
}

// New checks the configuration, locks the state directory and reads it. Run releases the
// lock when it returns.
func New(cfg Config) (server *Server, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, ready: make(chan struct{}), writeVIPs: make(chan struct{}, 1),
		refusals: rate.Sometimes{First: maxRefusals, Interval: time.Second},
	}
	s.places, s.unread = intake.NewPlaces(cfg.MaxClients, cfg.MaxClientsPerAddress), intake.NewBudget(maxUnread, s.closedForUnread)
	if s.vips, err = openVIPs(cfg.StateDir, cfg.Logger); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.vips.close()
		}
	}()
	if err := s.newTLS(); err != nil {
		return nil, err
	}
	if s.identities, err = newIdentities(cfg); err != nil {
		return nil, err
	}
	if s.inputs, err = newInputs(cfg, s.vips.dir, func(step string, err error) { s.result(step, err) }); err != nil {
		return nil, err
	}
	if s.identities != nil && s.inputs.clusters != nil {
		s.identities.Others = s.inputs.clusters.Tokens
	}
	s.push = push.New(push.Config{
		Hosts: cfg.newHosts(len(s.inputs.all), s.vips.VIPs), FirstRead: s.inputs.read, AckTimeout: cfg.AckTimeout,
		Check: s.checkNode, Behind: s.behind, Logger: cfg.Logger, Replica: cfg.Identity,
		Room:       func() error { return s.memory.check(tableShare) },
		Comparable: cfg.ConfigDir == "" && cfg.ClustersNamespace == "", // revisions come from the own API server
	})
	s.memory = newMemoryLimit(cfg.MemoryLimit, s.push.NoMemory, cfg.Logger)
	if s.writer, err = s.newWriter(); err != nil {
		return nil, err
	}
	if s.metrics, err = newMetrics(cfg.Registerer, append(s.push.Metrics(), newResourceMetrics(s), newCertificateMetrics(s), newLeaseMetric(s), newUnreadMetric(s.unread))...); err != nil {
		return nil, err
	}
	s.report = newReport(cfg.Logger, s.metrics)
	return s, nil
}

// Ready returns a channel that is closed when the server listens and the first tables are
// built. Before that, no stream is served.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr returns the address on which ADS is served, in plaintext if that is configured. Call it only
// after Ready is closed.
func (s *Server) Addr() net.Addr { return s.addr }

// TLSAddr returns the address on which ADS is served, over TLS if that is configured. Call it only
// after Ready is closed.
func (s *Server) TLSAddr() net.Addr { return s.tlsAddr }

// Waiting returns why the server is not ready, or "" if it is.
func (s *Server) Waiting() string {
	if why := s.waitingForCertificate(); why != "" {
		return why
	}
	return s.waitingFor()
}

// Replica returns the name of this replica.
func (s *Server) Replica() string { return s.cfg.Identity }

// Agents returns the state of each client of this replica, see [push.Service.Agents].
func (s *Server) Agents(namespace string) iter.Seq[push.Agent] { return s.push.Agents(namespace) }

// Errors returns the errors in objects and in the places where they are read. Errors in the
// configuration directory are sorted by file and line.
func (s *Server) Errors() []object.Error { return s.errors() }

// Run serves the tables of all sources until ctx ends, and then returns nil, or until something fails. All
// its goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	defer s.vips.close()
	endpoints, err := s.listen(ctx)
	if err != nil {
		return err
	}
	s.addr, s.tlsAddr = endpoints[0].listener.Addr(), endpoints[len(endpoints)-1].listener.Addr()
	group, ctx := errgroup.WithContext(ctx)
	s.awaitCertificate(ctx, group)
	group.Go(func() error { return s.serveADS(ctx, endpoints) })
	group.Go(func() error {
		s.push.Run(ctx)
		return nil
	})
	group.Go(func() error {
		s.inputs.run(ctx)
		return nil
	})
	group.Go(func() error {
		s.follow(ctx)
		return nil
	})
	if s.writer != nil {
		group.Go(func() error { return s.runWriter(ctx) })
	}
	return group.Wait()
}
