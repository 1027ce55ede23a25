package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/nds"
)

// A Config says what an [Agent] runs.
type Config struct {
	// DNS configures the query path. Its Logger and Registerer are set by New.
	DNS dnsproxy.Config
	// XDS configures the push path. Its Logger, Registerer and Changed are set by New.
	XDS nds.Config
	// StatusAddr is the host:port of the status endpoints; an empty host means
	// all addresses, port 0 a free port.
	StatusAddr string
	// StateDirRequired makes a state directory (XDS.StateDir) that cannot be used
	// an error; otherwise the agent goes on without a snapshot and says so.
	StateDirRequired bool
	// Drain is how long queries are still answered after the end was asked for;
	// 0 ends at once.
	Drain time.Duration
	// ReadyTimeout bounds the time without a table in which the agent is not
	// ready; afterwards it is, and forwards.
	ReadyTimeout time.Duration
	// Capture has queries redirected to the agent; nil captures none.
	Capture *CaptureConfig
	// Restarts is how often the agent was started before, by what supervises it.
	Restarts int
	// Logger takes what an operator should know.
	Logger *slog.Logger
	// Collectors are served beside the agent's own metrics.
	Collectors []prometheus.Collector
}

// DefaultConfig returns a Config with all defaults. It captures nothing, and lacks what only
// the host or its user can say: a logger and the node's name and addresses.
func DefaultConfig() Config {
	cfg := Config{
		DNS: dnsproxy.DefaultConfig(), XDS: nds.DefaultConfig(),
		StatusAddr: ":15020", Drain: 5 * time.Second, ReadyTimeout: 30 * time.Second,
	}
	cfg.DNS.OriginalDestination = true
	return cfg
}

// An Agent is one running nametap. Make one with [New], start it with
// [Agent.Run].
type Agent struct {
	config  Config
	log     *slog.Logger
	proxy   *dnsproxy.Server
	client  *nds.Client
	status  *statusServer
	capture *capture // nil: captures nothing

	started  time.Time
	draining atomic.Bool
	quit     func() // asks for the end; may be called any number of times
	quitting chan struct{}
	hasten   func() // ends the drain; may be called any number of times
	hastened chan struct{}
	changed  chan struct{} // receives when addresses of the interfaces changed
	memory   *memory
	ready    chan struct{} // closed when queries are answered from a table
}

// New checks the configuration and opens the status socket. An error names the
// setting and what it should be.
func New(ctx context.Context, cfg Config) (*Agent, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	registry.MustRegister(cfg.Collectors...)
	registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "nametap_restarts_total", Help: "Times that --supervise has restarted the agent.",
	}, func() float64 { return float64(cfg.Restarts) }))
	cfg.DNS.Logger, cfg.DNS.Registerer = cfg.Logger, registry
	cfg.XDS.Logger, cfg.XDS.Registerer = cfg.Logger, registry
	if err := cfg.prepareStateDir(); err != nil {
		return nil, err
	}
	proxy, err := dnsproxy.New(cfg.DNS)
	if err != nil {
		return nil, err
	}
	changed := make(chan struct{}, 1)
	cfg.XDS.Changed = changed
	memory := newMemory()
	client, err := nds.New(cfg.XDS, func(resources []nds.Resource) error {
		defer memory.note()
		return proxy.Load(values(resources))
	})
	if err != nil {
		return nil, err
	}
	a := &Agent{
		config:   cfg,
		log:      cfg.Logger,
		proxy:    proxy,
		client:   client,
		quitting: make(chan struct{}),
		hastened: make(chan struct{}),
		changed:  changed,
		memory:   memory,
		ready:    make(chan struct{}),
	}
	a.quit = sync.OnceFunc(func() { close(a.quitting) })
	a.hasten = sync.OnceFunc(func() { close(a.hastened) })
	if cfg.Capture != nil {
		if a.capture, err = newCapture(*cfg.Capture, proxy, cfg.Logger); err != nil {
			return nil, err
		}
	}
	a.capture.register(registry)
	a.status, err = newStatusServer(ctx, a, registry)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// values returns the wire bytes of the NameTables of a push.
func values(resources []nds.Resource) [][]byte {
	tables := make([][]byte, len(resources))
	for i, resource := range resources {
		tables[i] = resource.Value
	}
	return tables
}

// prepareStateDir makes the directory of the snapshot.
func (c *Config) prepareStateDir() error {
	if c.XDS.StateDir == "" {
		return nil
	}
	err := statedir.Check(c.XDS.StateDir)
	switch {
	case err == nil:
		return nil
	case c.StateDirRequired:
		return fmt.Errorf("state directory %q: want one that can be made and written (--state-dir): %w", c.XDS.StateDir, err)
	}
	c.Logger.Warn("no snapshot of the table can be kept now: a restart without the control plane starts empty; set --state-dir",
		"dir", c.XDS.StateDir, "error", err)
	return nil
}

// Run answers queries until ctx ends or a client asked for the end, then drains: the
// capture rules go, queries are still answered for the drain time, after which the
// listeners close and what is in flight is finished. It returns after all its
// goroutines have; the error is nil unless a part died.
func (a *Agent) Run(ctx context.Context) error {
	a.started = time.Now()
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, serving := errgroup.WithContext(serving)
	group.Go(func() error {
		a.awaitSnapshot(serving)
		return a.proxy.Run(serving)
	})
	group.Go(func() error { return a.client.Run(serving) })
	group.Go(func() error {
		a.memory.run(serving, freeMemory)
		return nil
	})
	group.Go(func() error {
		if err := watchAddresses(serving, a.changed); err != nil {
			a.log.Info("changes of addresses are noticed within 10 s only", "error", err)
		}
		return nil
	})
	group.Go(func() error { return a.status.Run(serving) })
	group.Go(func() error { return a.announce(serving) })
	capturing, release := context.WithCancel(serving)
	defer release()
	released := make(chan struct{})
	group.Go(func() error {
		defer close(released)
		if a.capture == nil {
			return nil
		}
		return a.capture.run(capturing)
	})
	group.Go(func() error { return a.notifySystemd(serving) })
	group.Go(func() error {
		defer stop()
		a.drain(ctx, serving, release)
		<-released
		return nil
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	a.log.Info("ended")
	return nil
}

// snapshotTimeout is how long queries wait for the snapshot. A large one takes less; a
// disk that does not answer must not keep names from being forwarded.
const snapshotTimeout = 2 * time.Second

// awaitSnapshot returns when the snapshot is in use, if there is one. Queries that have
// waited for us in sockets must not be answered as if there were no table.
func (a *Agent) awaitSnapshot(ctx context.Context) {
	timer := time.NewTimer(snapshotTimeout)
	defer timer.Stop()
	select {
	case <-a.client.Restored():
	case <-timer.C:
	case <-ctx.Done():
	}
}

// announce closes ready, and says so, once queries are answered from a table.
func (a *Agent) announce(ctx context.Context) error {
	for _, ready := range []<-chan struct{}{a.proxy.Ready(), a.client.Ready()} {
		select {
		case <-ready:
		case <-ctx.Done():
			return nil
		}
	}
	close(a.ready)
	a.log.Info("ready", "hosts", a.proxy.Table().Len(), "dns", a.proxy.Addrs(), "after", time.Since(a.started).Round(time.Millisecond))
	return nil
}

// drain waits for the end to be asked for, has the capture rules released, and waits
// for the drain time.
func (a *Agent) drain(ctx, serving context.Context, release func()) {
	select {
	case <-ctx.Done():
	case <-a.quitting:
	case <-serving.Done():
		return
	}
	a.draining.Store(true)
	a.log.Info("draining: queries are still answered", "for", a.config.Drain)
	release()
	timer := time.NewTimer(a.config.Drain)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.hastened:
		a.log.Info("the drain is cut short")
	case <-serving.Done():
	}
}

// SetCapture changes which queries are redirected to the agent. It has no effect on an agent
// that was made without a CaptureConfig. On an error, such as a required family without
// listeners, everything stays as it is until the reason has gone.
func (a *Agent) SetCapture(cfg CaptureConfig) error {
	if a.capture == nil {
		return nil
	}
	return a.capture.change(func(in *inputs) { in.CaptureConfig = cfg })
}

// Hasten ends the drain that goes on, or the next one, at once. The capture rules are
// taken out all the same.
func (a *Agent) Hasten() { a.hasten() }

// Ready is closed once queries are answered from a table.
func (a *Agent) Ready() <-chan struct{} { return a.ready }

// Proxy returns the query path, to ask where it listens.
func (a *Agent) Proxy() *dnsproxy.Server { return a.proxy }

// StatusAddr returns the address of the status endpoints.
func (a *Agent) StatusAddr() string { return a.status.Addr() }
