package discovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	defaultGRPCAddr         = "localhost:15010"
	defaultClusterDomain    = "cluster.local"
	defaultServiceExportTo  = "*"
	defaultTokenAudience    = "istio-ca"
	defaultMaxClients       = 20000
	defaultClusterTimeout   = 20 * time.Second
	defaultAckTimeout       = 2 * time.Minute
	defaultMaxConnectionAge = 30 * time.Minute
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
	// TLSAddr is the "host:port" on which ADS is served over TLS, to clients that prove who they
	// are. "" means that it is not.
	TLSAddr string
	// TLS are the files of the server's certificate and of the authorities of clients'.
	TLS auth.Files
	// TLSSecret is the Secret of the server's certificate, instead of files; nil for files.
	TLSSecret *TLSSecret
	// Certificate says that the caller serves something with the certificate of the server, too.
	Certificate bool
	// TokenAudience is the audience of clients' tokens, which the Kubernetes API reviews; ""
	// means "istio-ca".
	TokenAudience string
	// TrustDomain is that of clients' certificates; "" means ClusterDomain.
	TrustDomain string
	// ClusterID is what clients may claim as their cluster; "" means anything.
	ClusterID string
	// Lease is that whose holder writes automatic VIPs to the status of ServiceEntries, so that all
	// replicas give a host the same. Without one, none are written.
	Lease source.Lease
	// Identity names this replica in the Lease; "" means the name of the machine.
	Identity string
	// ClusterDomain is the domain of Services; "" means "cluster.local".
	ClusterDomain string
	// RootNamespace is the namespace of the ConfigMap with the settings of the mesh, at the API server,
	// and of the default Sidecar if these settings name no other; "" means "istio-system".
	RootNamespace string
	// DefaultServiceExportTo are the namespaces that see the hosts of Services and ServiceEntries without
	// an exportTo, if the settings of the mesh do not say that: names, ".", "*" or "~", separated by
	// commas. "" means "*".
	DefaultServiceExportTo string
	// ClustersNamespace is the namespace, at the API server, of the Secrets with kubeconfigs of other
	// clusters, whose hosts are served, too. "" means that there are none.
	ClustersNamespace string
	// HeadlessScope says which clients get the endpoints of headless Services that do not say it; 0
	// means those in the network of the endpoints.
	HeadlessScope object.HeadlessScope
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
	// Debounce is how long the directory must be quiet before it is read again; during
	// continuous edits it is read after ten times that. 0 means 30 ms.
	Debounce time.Duration
	// MaxClients bounds the streams that are served at a time. 0 means 20,000.
	MaxClients int
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
	if c.ClusterDomain == "" {
		c.ClusterDomain = defaultClusterDomain
	}
	if c.RootNamespace == "" {
		c.RootNamespace = object.DefaultRootNamespace
	}
	if c.DefaultServiceExportTo == "" {
		c.DefaultServiceExportTo = defaultServiceExportTo
	}
	if c.TokenAudience == "" {
		c.TokenAudience = defaultTokenAudience
	}
	if c.TrustDomain == "" {
		c.TrustDomain = c.ClusterDomain
	}
	if c.HeadlessScope == 0 {
		c.HeadlessScope = object.ScopeNetwork
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
	if _, err := object.ParseExportTo(c.DefaultServiceExportTo, ""); err != nil {
		return fmt.Errorf("default exportTo of Services: %w (--default-service-export-to)", err)
	}
	return nil
}

// newHosts returns no hosts. The automatic VIPs are allocated in vips.
func (c Config) newHosts(vips *hosts.VIPs) *hosts.Hosts {
	h := hosts.New(c.ClusterDomain, len(c.sources()), vips)
	h.SetDefaults(object.Mesh{RootNamespace: c.RootNamespace, ExportTo: object.SplitScopes(c.DefaultServiceExportTo)})
	h.SetHeadlessScope(c.HeadlessScope)
	return h
}

// checkDir returns an error if the configuration directory does not exist.
func (c Config) checkDir() error {
	if c.ConfigDir == "" {
		return nil
	}
	info, err := os.Stat(c.ConfigDir)
	switch {
	case err != nil:
		return fmt.Errorf("configuration directory %q: %s: create it, or name another (--config-dir)",
			c.ConfigDir, plainError(err))
	case !info.IsDir():
		return fmt.Errorf("configuration directory %q is a file: want a directory (--config-dir)", c.ConfigDir)
	}
	return nil
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

	firstRead chan struct{}     // closed when the first reading of each source has been served or refused
	readOnce  func()            // closes firstRead
	kube      source.Objects    // nil without the Kubernetes API
	changed   chan struct{}     // has an element when objects of the Kubernetes API have changed
	clusters  source.Clusters   // nil without other clusters
	missing   map[string]string // why other clusters have no objects; owned by publishClusters

	writer    source.Writer // nil without a Lease
	writeVIPs chan struct{} // has an element when VIPs may have to be written

	refusals rate.Sometimes // logs clients that are refused
	memory   *memoryLimit

	// The fields below are owned by the goroutine of rebuildOnChange.
	state          *statedir.Dir // nil without a state directory; locked
	dir            *dirSource
	objectsUnsaved bool      // the file of last good objects is older than dir.good
	objectsSaved   time.Time // when that file was last written

	building    sync.Mutex // guards the fields up to serving
	inputs      map[string]input
	read        map[string]bool // sources that were read, or that could not be
	vips        *hosts.VIPs
	vipsUnsaved bool // the file of VIPs is older than vips
	built       bool // the last readings are served
	serving     bool // readings were served; ready is closed

	mu      sync.Mutex
	logged  map[string]bool // errors and failures that were logged and have not ended
	errs    []object.Error
	dirErr  *object.Error // why the configuration directory cannot be read
	waiting string        // why the server is not ready; "" once it is
	heard   source.Heard  // the state of the API server that is served
}

// New checks the configuration, locks the state directory and reads it. Run releases the
// lock when it returns.
func New(cfg Config) (server *Server, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, ready: make(chan struct{}), vips: hosts.NewVIPs(), logged: map[string]bool{},
		waiting:   "no object has been read yet",
		firstRead: make(chan struct{}), changed: make(chan struct{}, 1), writeVIPs: make(chan struct{}, 1), inputs: map[string]input{}, read: map[string]bool{},
	}
	s.refusals = rate.Sometimes{First: maxRefusals, Interval: time.Second}
	s.readOnce = sync.OnceFunc(func() { close(s.firstRead) })
	defer func() {
		if err != nil {
			s.releaseState()
		}
	}()
	good, err := s.load()
	if err != nil {
		return nil, err
	}
	s.push = push.New(push.Config{
		Hosts: cfg.newHosts(s.vips), FirstRead: s.firstRead, MaxClients: cfg.MaxClients, AckTimeout: cfg.AckTimeout,
		Check: s.checkNode, Behind: s.behind, Logger: cfg.Logger,
		Comparable: cfg.ConfigDir == "" && cfg.ClustersNamespace == "", // a revision is of the own API server
	})
	s.memory = newMemoryLimit(cfg.MemoryLimit, s.push.NoMemory, cfg.Logger)
	if err := cfg.checkDir(); err != nil {
		if len(good) == 0 {
			return nil, err
		}
		cfg.Logger.Error("serving the last good objects", "objects", len(good), "error", err)
	}
	if err := s.newTLS(); err != nil {
		return nil, err
	}
	if s.identities, err = newIdentities(cfg); err != nil {
		return nil, err
	}
	s.dir = newDirSource(cfg.ConfigDir, cfg.AllowEmpty, good)
	if cfg.Kubernetes != nil {
		if s.kube, err = newKubernetes(cfg, func() { notify(s.changed) }, s.selectNamespaces); err != nil {
			return nil, err
		}
	}
	if err := s.newClusters(); err != nil {
		return nil, err
	}
	if s.writer, err = s.newWriter(); err != nil {
		return nil, err
	}
	if s.metrics, err = newMetrics(cfg.Registerer, append(s.push.Metrics(), newResourceMetrics(s), newCertificateMetrics(s), newLeaseMetric(s))...); err != nil {
		return nil, err
	}
	return s, nil
}

// load locks and reads the state directory, and returns the last good objects.
func (s *Server) load() (map[object.Key]located, error) {
	if s.cfg.StateDir == "" {
		return nil, nil //nolint:nilnil // a nil map has no objects
	}
	var err error
	if s.state, err = openState(s.cfg.StateDir); err != nil {
		return nil, err
	}
	v, err := loadVIPs(s.cfg.StateDir)
	switch {
	case errors.Is(err, errDamaged):
		s.cfg.Logger.Error("the file of automatic VIPs is damaged and was moved", "error", err)
	case err != nil:
		return nil, err
	}
	s.vips = v
	good, err := loadObjects(s.cfg.StateDir)
	switch {
	case errors.Is(err, errDamaged):
		s.cfg.Logger.Error("the file of last good objects is damaged and was moved; objects in broken documents are left out", "error", err)
	case err != nil:
		return nil, err
	}
	return good, nil
}

// releaseState unlocks the state directory, if there is one.
func (s *Server) releaseState() {
	if s.state != nil {
		s.state.Unlock()
	}
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
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting
}

// Consistency returns which tables are served, and which clients have them.
func (s *Server) Consistency() push.Consistency { return s.push.Consistency() }

// Errors returns the errors in the configuration directory and its documents, sorted by
// file and line.
func (s *Server) Errors() []object.Error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dirErr != nil {
		return append([]object.Error{*s.dirErr}, s.errs...)
	}
	return slices.Clone(s.errs)
}

// Run serves the tables of the configuration directory until ctx ends, and then returns
// nil, or until something fails. All its goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	defer s.releaseState()
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
	if s.clusters != nil {
		group.Go(func() error {
			s.clusters.Run(ctx)
			return nil
		})
	}
	if s.cfg.ConfigDir != "" {
		group.Go(func() error { return s.rebuildOnChange(ctx) })
	}
	if s.kube != nil {
		group.Go(func() error {
			s.kube.Run(ctx)
			return nil
		})
		group.Go(func() error {
			s.followKubernetes(ctx)
			return nil
		})
	}
	if s.writer != nil {
		group.Go(func() error { return s.runWriter(ctx) })
	}
	return group.Wait()
}
