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

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	serverv3 "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
)

const (
	// DefaultClusterDomain is the domain of Services unless Config says another.
	DefaultClusterDomain = "cluster.local"
	// stopGrace is how long streams may take to end when the server stops.
	stopGrace = time.Second
)

// Config configures a Server.
type Config struct {
	// ConfigDir is the directory of objects. It must exist.
	ConfigDir string
	// GRPCAddr is where ADS is served, plaintext, as "host:port"; port 0 takes
	// a free one. Empty is ":15010".
	GRPCAddr string
	// ClusterDomain is the domain of Services. Empty is "cluster.local".
	ClusterDomain string
	// StateDir is where automatic VIPs are remembered. It is made if it is not
	// there. Empty keeps them in memory: after a restart a host has the VIP of
	// before unless two hosts want the same one.
	StateDir string
	// Debounce is how long the directory must be quiet before it is read
	// again; under constant edits it is read after ten times that. 0 is 30 ms.
	Debounce time.Duration
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
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) validate() error {
	info, err := os.Stat(c.ConfigDir)
	switch {
	case c.ConfigDir == "":
		return errors.New("no configuration directory: name the directory that holds your Services and ServiceEntries")
	case err != nil:
		return fmt.Errorf("configuration directory %q: %s: make it, or name the one that holds your objects",
			c.ConfigDir, plainError(err))
	case !info.IsDir():
		return fmt.Errorf("configuration directory %q is a file: name the directory that holds it", c.ConfigDir)
	}
	if !isHost(c.ClusterDomain) {
		return fmt.Errorf("cluster domain %q: want a DNS name such as %s", c.ClusterDomain, DefaultClusterDomain)
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

	// Owned by the goroutine that builds.
	source  *source
	vips    *vips
	seen    map[string]bool // what the log has said and is still so
	built   bool            // the last reading is in effect
	unsaved bool            // the VIP state on disk is older than vips

	mu   sync.Mutex
	errs []DocumentError
}

// New checks the configuration and reads the remembered VIPs.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, cache: newCache(), ready: make(chan struct{}),
		source: newSource(cfg.ConfigDir), vips: &vips{}, seen: map[string]bool{},
	}
	if cfg.StateDir != "" {
		if err := prepareStateDir(cfg.StateDir); err != nil {
			return nil, fmt.Errorf("%w: make it writable, or name another", err)
		}
		v, err := loadVIPs(cfg.StateDir)
		switch {
		case errors.Is(err, errDamaged):
			cfg.Logger.Error("set aside what was remembered of automatic VIPs", "error", err)
		case err != nil:
			return nil, err
		}
		s.vips = v
	}
	var err error
	if s.metrics, err = newMetrics(cfg.Registerer); err != nil {
		return nil, err
	}
	return s, nil
}

// Ready is closed once the server listens and the first tables are built.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr is the address that ADS is served on. It may be called after Ready.
func (s *Server) Addr() net.Addr { return s.addr }

// Errors says what is wrong with documents of the configuration directory
// now, sorted by file and line.
func (s *Server) Errors() []DocumentError {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.errs)
}

// Run listens, builds, serves and watches until ctx ends, and returns nil then;
// or until one of these fails. All goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", s.cfg.GRPCAddr)
	if err != nil {
		return fmt.Errorf("serving ADS on %s: %w", s.cfg.GRPCAddr, err)
	}
	w, err := newWatcher(s.cfg.Debounce)
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	if err := s.firstBuild(w); err != nil {
		return errors.Join(err, w.close(), ln.Close())
	}
	s.addr = ln.Addr()
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
		return nil
	})
	group.Go(func() error { return errors.Join(s.follow(ctx, w), w.close()) })
	close(s.ready)
	s.cfg.Logger.Info("serving name tables", "address", s.addr.String(), "config_dir", s.cfg.ConfigDir)
	return group.Wait()
}

func (s *Server) newGRPCServer(ctx context.Context) *grpc.Server {
	srv := grpc.NewServer(
		// Clients look for a dead peer every 30 s or faster; gRPC's own limit
		// of one ping in 5 minutes would have them thrown out.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	)
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

func (s *Server) firstBuild(w *watcher) error {
	// The first reading says what to watch; the second sees what was written
	// before the watch was in place.
	r, err := s.build()
	if err != nil {
		return err
	}
	if _, err := w.sync(r.dirs); err != nil {
		s.failed("watch", err)
	}
	_, err = s.build()
	return err
}

// follow builds again whenever the directory changes.
func (s *Server) follow(ctx context.Context, w *watcher) error {
	next := rescanEvery
	for {
		if err := w.wait(ctx, next); err != nil {
			return fmt.Errorf("watching %s: %w", s.cfg.ConfigDir, err)
		}
		select {
		case <-ctx.Done():
			return nil
		default:
		}
		next = rescanEvery
		if !s.rebuild(w) {
			next = retryEvery
		}
	}
}

// rebuild builds until all directories are watched. It reports whether there
// is nothing to do before the next change.
func (s *Server) rebuild(w *watcher) bool {
	for {
		r, err := s.build()
		if err != nil {
			s.failed("read", err)
			return false
		}
		s.recovered("read")
		again, err := w.sync(r.dirs)
		if err != nil {
			s.failed("watch", err)
			return false
		}
		s.recovered("watch")
		if !again {
			return !r.unsettled
		}
	}
}

// failed says once what goes wrong again and again.
func (s *Server) failed(step string, err error) {
	s.metrics.failures.WithLabelValues(step).Inc()
	if !s.seen[step] {
		s.seen[step] = true
		s.cfg.Logger.Error("cannot "+step+"; the last tables stay", "error", err)
	}
}

// recovered lets the next failure of a step be said again.
func (s *Server) recovered(step string) { delete(s.seen, step) }

// build reads the directory and makes its tables effective.
func (s *Server) build() (reading, error) {
	r, err := s.source.read()
	if err != nil {
		return r, err
	}
	if r.same && s.built && !s.unsaved {
		return r, nil
	}
	s.built = false
	snap, a := snapshotOf(r.objects, s.cfg.ClusterDomain, s.vips)
	s.report(r, a)
	s.remember(a)
	s.metrics.observe(r, snap, a)
	if err := s.cache.set(snap); err != nil {
		return r, err
	}
	s.built = true
	return r, nil
}

// snapshotOf builds what is served from objects; v is the only thing changed.
func snapshotOf(objects []object, domain string, v *vips) (*snapshot, allocation) {
	claims := buildClaims(objects, domain)
	a := v.allocate(wantedVIPs(claims), claimedSlots(claims))
	return &snapshot{claims: claims, slots: a.slots}, a
}

// remember writes the VIPs before any client sees them: a crash must not
// forget what was given out. A disk that is full must not stop the service
// either, so a failure is said and tried again at the next build.
func (s *Server) remember(a allocation) {
	if s.cfg.StateDir == "" {
		return
	}
	if s.unsaved = s.unsaved || a.changed; !s.unsaved {
		return
	}
	if err := s.vips.save(s.cfg.StateDir); err != nil {
		s.failed("save", err)
		return
	}
	s.unsaved = false
	s.recovered("save")
}

// report logs what is new: a document that stays broken is logged once, and
// again if it breaks again.
func (s *Server) report(r reading, a allocation) {
	s.mu.Lock()
	s.errs = r.errs
	s.mu.Unlock()
	now := map[string]bool{}
	say := func(line string, log func()) {
		if now[line] = true; !s.seen[line] {
			log()
		}
	}
	for _, e := range r.errs {
		say("document "+e.Error(), func() {
			s.cfg.Logger.Error("broken document", "error", e, "kept_last_good", e.Kept)
		})
	}
	for _, note := range r.notes {
		say("note "+note, func() { s.cfg.Logger.Info("an object makes no host", "what", note) })
	}
	for _, host := range a.without {
		say("no vip "+host, func() { s.cfg.Logger.Error("no automatic VIP is left", "host", host) })
	}
	for _, host := range a.moved {
		s.cfg.Logger.Warn("another object claims the automatic VIP, the host gets a new one", "host", host)
	}
	for _, step := range []string{"read", "watch", "save"} {
		if s.seen[step] {
			now[step] = true
		}
	}
	s.seen = now
}
