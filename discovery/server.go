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
	"sync/atomic"
	"time"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"github.com/nametap/nametap/internal/statedir"
)

const (
	// DefaultClusterDomain is the domain of Services unless Config says another.
	DefaultClusterDomain = "cluster.local"
	// DefaultMaxClients is how many streams are served at a time unless Config
	// says another number.
	DefaultMaxClients       = 20000
	defaultAckTimeout       = 2 * time.Minute
	defaultMaxConnectionAge = 30 * time.Minute
	// stopGrace is how long streams may take to end when the server stops.
	stopGrace = time.Second
)

// Config configures a Server.
type Config struct {
	// ConfigDir is the directory of objects. It must exist when the server
	// starts, unless StateDir holds the last good objects.
	ConfigDir string
	// GRPCAddr is where ADS is served, plaintext, as "host:port"; port 0 takes
	// a free one. Empty is ":15010".
	GRPCAddr string
	// ClusterDomain is the domain of Services. Empty is "cluster.local".
	ClusterDomain string
	// AllowEmpty is set if a directory without an object is right. Without it
	// the server is not ready before it has an object, and keeps the last good
	// objects when the directory becomes empty.
	AllowEmpty bool
	// StateDir is where automatic VIPs and the last good form of all objects
	// are remembered. It is made if it is not there. Empty keeps both in
	// memory: after a restart a host has the VIP of before unless two hosts
	// want the same one, and a broken object has no last good form.
	StateDir string
	// Debounce is how long the directory must be quiet before it is read
	// again; under constant edits it is read after ten times that. 0 is 30 ms.
	Debounce time.Duration
	// MaxClients bounds the streams that are served at a time. 0 is 20,000.
	MaxClients int
	// AckTimeout is how long a client may take to acknowledge a push before its
	// stream is ended. 0 is 2 minutes.
	AckTimeout time.Duration
	// MaxConnectionAge is how long a connection stands, a tenth more or less,
	// before its client is told to connect again. 0 is 30 minutes.
	MaxConnectionAge time.Duration
	// Logger gets what the server has to say. nil discards it.
	Logger *slog.Logger
	// Registerer gets the metrics. nil registers them nowhere.
	Registerer prometheus.Registerer
}

func (c Config) withDefaults() Config {
	if c.GRPCAddr == "" {
		c.GRPCAddr = ":15010"
	}
	if c.ClusterDomain == "" {
		c.ClusterDomain = DefaultClusterDomain
	}
	if c.Debounce <= 0 {
		c.Debounce = defaultDebounce
	}
	if c.MaxClients <= 0 {
		c.MaxClients = DefaultMaxClients
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
	if c.ConfigDir == "" {
		return errors.New("no configuration directory: name the directory that holds your Services and ServiceEntries")
	}
	if !isHost(c.ClusterDomain) {
		return fmt.Errorf("cluster domain %q: want a DNS name such as %s", c.ClusterDomain, DefaultClusterDomain)
	}
	return nil
}

// checkDir finds out early whether the configuration directory is there.
func (c Config) checkDir() error {
	info, err := os.Stat(c.ConfigDir)
	switch {
	case err != nil:
		return fmt.Errorf("configuration directory %q: %s: make it, or name the one that holds your objects",
			c.ConfigDir, plainError(err))
	case !info.IsDir():
		return fmt.Errorf("configuration directory %q is a file: name the directory that holds it", c.ConfigDir)
	}
	return nil
}

// Server is the control plane. New makes one and Run runs it, once.
type Server struct {
	cfg     Config
	metrics *metrics
	cache   *cache
	ready   chan struct{}
	addr    net.Addr // written before ready is closed

	clients atomic.Int64   // open streams
	streams sync.WaitGroup // their handlers

	// Owned by the goroutine that builds.
	state   *statedir.Dir // nil without a state directory; locked
	source  *source
	vips    *vips
	seen    map[string]bool // what the log has said and is still so
	built   bool            // the last reading is in effect
	serving bool            // a reading has been in effect; ready is closed
	unsaved bool            // the VIP state on disk is older than vips
	// The file of last good objects is older than source.good, and when it was
	// written last.
	objectsUnsaved bool
	objectsSaved   time.Time

	mu      sync.Mutex
	errs    []DocumentError
	dirErr  *DocumentError // the configuration directory cannot be read
	waiting string         // why the server is not ready; "" once it is
}

// New checks the configuration, locks the state directory and reads it. Run releases the
// lock when it returns.
func New(cfg Config) (server *Server, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, cache: newCache(), ready: make(chan struct{}), vips: &vips{}, seen: map[string]bool{},
		waiting: "the configuration directory has not been read yet",
	}
	defer func() {
		if err != nil {
			s.releaseState()
		}
	}()
	good, err := s.load()
	if err != nil {
		return nil, err
	}
	if err := cfg.checkDir(); err != nil {
		if len(good) == 0 {
			return nil, err
		}
		cfg.Logger.Error("the last good objects are served", "objects", len(good), "error", err)
	}
	s.source = newSource(cfg.ConfigDir, cfg.AllowEmpty, good)
	if s.metrics, err = newMetrics(cfg.Registerer); err != nil {
		return nil, err
	}
	return s, nil
}

// load locks and reads the state directory, and returns the last good objects.
func (s *Server) load() (map[key]object, error) {
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
		s.cfg.Logger.Error("set aside the file of automatic VIPs", "error", err)
	case err != nil:
		return nil, err
	}
	s.vips = v
	good, err := loadObjects(s.cfg.StateDir)
	switch {
	case errors.Is(err, errDamaged):
		s.cfg.Logger.Error("set aside the last good objects; a document that is broken now is left out", "error", err)
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

// Ready is closed once the server listens and the first tables are built. Until
// then no stream is served.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr is the address that ADS is served on. It may be called after Ready.
func (s *Server) Addr() net.Addr { return s.addr }

// Waiting says why the server is not ready. It is empty once it is.
func (s *Server) Waiting() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting
}

// Errors says what is wrong with documents of the configuration directory
// now, or with the directory itself, sorted by file and line.
func (s *Server) Errors() []DocumentError {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.dirErr != nil {
		return append([]DocumentError{*s.dirErr}, s.errs...)
	}
	return slices.Clone(s.errs)
}

// Run listens, builds, serves and watches until ctx ends, and returns nil then;
// or until one of these fails. All goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	defer s.releaseState()
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", s.cfg.GRPCAddr)
	if err != nil {
		return fmt.Errorf("serving ADS on %s: %w", s.cfg.GRPCAddr, err)
	}
	s.addr = ln.Addr()
	ln = &boundedListener{Listener: ln, max: int64(s.cfg.MaxClients + spareConns),
		over: s.metrics.ended.WithLabelValues(endedTooMany).Inc}
	group, ctx := errgroup.WithContext(ctx)
	srv := s.newGRPCServer(ctx)
	group.Go(func() error {
		if err := srv.Serve(ln); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serving ADS on %s: %w", s.cfg.GRPCAddr, err)
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		stop(srv)
		s.streams.Wait()
		return nil
	})
	group.Go(func() error { return s.follow(ctx) })
	return group.Wait()
}

func (s *Server) newGRPCServer(ctx context.Context) *grpc.Server {
	srv := grpc.NewServer(s.serverOptions()...)
	ads := serverv3.NewServer(ctx, s.cache, s.callbacks())
	discoveryv3.RegisterAggregatedDiscoveryServiceServer(srv, ads)
	return srv
}

// stop ends the streams, which the end of their context has told to go.
func stop(srv *grpc.Server) {
	timer := time.AfterFunc(stopGrace, srv.Stop)
	defer timer.Stop()
	srv.GracefulStop()
}
