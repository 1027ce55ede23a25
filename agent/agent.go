package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/agent/problems"
	"github.com/nametap/nametap/agent/querylog"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/egress"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/nds"
)

// A Config configures an [Agent].
type Config struct {
	// DNS configures the query path. Its Logger and Registerer are set by New.
	DNS dnsproxy.Config
	// XDS configures the push path. Its Logger, Registerer and Changed are set by New.
	XDS nds.Config
	// StatusAddr is the host:port of the status endpoints. An empty host means all
	// addresses, port 0 a free port.
	StatusAddr string
	// StatusSockets are listening TCP sockets on the port of StatusAddr that another process holds.
	// They replace the socket that New would open. New closes the files.
	StatusSockets []*os.File
	// SocketDirs are the directories in which the socket of the private status endpoints may be:
	// see [SocketDirs]. Without any, there are no private endpoints.
	SocketDirs []string
	// StateDirRequired makes it an error that the state directory (XDS.StateDir) cannot be
	// used. Otherwise the agent logs it and runs without a snapshot.
	StateDirRequired bool
	// Drain is how long queries are still answered, and open connections to VIPs go on, at the end. With 0
	// the agent ends at once.
	Drain time.Duration
	// Service is true if a unit of systemd starts the agent again when it ends, and holds its
	// sockets, so that queries wait meanwhile.
	Service bool
	// DrainCaptured makes an agent of a Service drain after it has removed its rules.
	DrainCaptured bool
	// ReadyTimeout is how long the agent is not ready for want of a table. After that it
	// is ready and forwards, because a pod and a VM must start without a control plane too.
	ReadyTimeout time.Duration
	// Capture configures the redirection of queries to the agent. Nil redirects none.
	Capture *CaptureConfig
	// Egress configures the connections to automatic VIPs. Its Table, Resolve, OwnPorts, Drain, Logger
	// and Registerer are set by New. Nil carries none.
	Egress *egress.Config
	// Records says where the records of queries go.
	Records RecordsConfig
	// Identity is the name of this agent in messages of dnstap.
	Identity string
	// Restarts is how often the supervisor has restarted the agent.
	Restarts int
	// Settings returns the settings that affect capture and differ from their defaults, by their names.
	// The commands for capture ask for them. It may be nil.
	Settings func() map[string][]string
	// FileSettings returns what has become of changes of the files with settings. It may be nil.
	FileSettings func() problems.Settings
	// DNSSettings returns the settings of DNS that [Agent.Configure] changes, as they are in use, if they
	// differ from their defaults, by their names. The status shows them. It may be nil.
	DNSSettings func() map[string][]string
	// Logger is the log.
	Logger *slog.Logger
	// Collectors are added to the agent's metrics.
	Collectors []prometheus.Collector
}

// DefaultConfig returns a Config with all defaults. It captures nothing. It lacks what has no
// default: a logger, and the name and the addresses of the node.
func DefaultConfig() Config {
	return Config{
		DNS: dnsproxy.DefaultConfig(), XDS: nds.DefaultConfig(),
		StatusAddr: ":15020", Drain: 5 * time.Second, ReadyTimeout: 30 * time.Second,
		Records: RecordsConfig{QueryLog: querylog.Failed},
	}
}

// An Agent is one running nametap. [New] makes it, [Agent.Run] runs it.
type Agent struct {
	config      Config
	log         *slog.Logger
	proxy       *dnsproxy.Server
	client      *nds.Client
	status      *statusServer
	diagnosis   *diagnosis
	capture     *capture       // nil: captures nothing
	egress      *egress.Server // nil: carries no connections
	egressEnded chan struct{}  // closed when all connections to VIPs have ended
	vipsHeld    atomic.Bool    // another process holds listeners for them

	started  time.Time
	clock    *clock.Clock
	draining atomic.Bool
	quit     func()           // closes quitting; may be called any number of times
	quitting chan struct{}    // closed when the agent has to end
	hasten   func()           // closes hastened; may be called any number of times
	hastened chan struct{}    // closed when the drain has to end
	handOver atomic.Bool      // the rules stay for the next agent
	changed  [2]chan struct{} // receive when addresses of the interfaces changed: the query path, the push path
	memory   *memory
	records  *records
	ready    chan struct{} // closed when queries are answered from a table
}

// New checks the configuration and opens the sockets of the status endpoints and for VIPs, so that
// wrong settings are reported before anything runs. An error names the setting and says what it
// should be. If another program has the port of such a socket, Run opens it later: DNS does not
// need it.
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
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.prepareStateDir()
	cfg.DNS.Forward.KeptResolvConf = runtimePath("resolv.conf") // stays over a restart, but not over a boot
	cfg.DNS.Forward.Control = setHops(queryHops)
	ticks, changed := cfg.setClock()
	proxy, err := dnsproxy.New(cfg.DNS)
	if err != nil {
		return nil, err
	}
	a := &Agent{
		config:      cfg,
		log:         cfg.Logger,
		proxy:       proxy,
		quitting:    make(chan struct{}),
		hastened:    make(chan struct{}),
		clock:       ticks,
		changed:     changed,
		memory:      newMemory(),
		ready:       make(chan struct{}),
		egressEnded: make(chan struct{}),
	}
	cfg.XDS.Resolver = controlResolver(proxy.Upstreams, func() []netip.AddrPort { return addrPorts(proxy) })
	a.records = newRecords(&cfg, registry)
	a.client, err = nds.New(cfg.XDS, func(shards map[int][]byte) error {
		const many = 64 // a quarter of the table
		defer a.noteTable(len(shards) >= many)
		return proxy.Load(shards)
	})
	if err != nil {
		return nil, err
	}
	a.quit = sync.OnceFunc(func() { close(a.quitting) })
	a.hasten = sync.OnceFunc(func() { close(a.hastened) })
	if cfg.Capture != nil {
		if a.capture, err = newCapture(cfg, proxy, ticks); err != nil {
			return nil, err
		}
		a.capture.registrar = a.newRegistrar(cfg.Capture.Config.Interval)
	}
	a.capture.register(registry)
	if a.egress, err = newEgress(ctx, cfg, a); err != nil {
		return nil, err
	}
	if a.status, err = newStatusServer(ctx, a, registry); err != nil {
		return nil, err
	}
	a.diagnosis = &diagnosis{agent: a}
	registry.MustRegister(a.diagnosis)
	return a, nil
}

// setClock gives all parts one clock, and the channels that receive when addresses change.
func (c *Config) setClock() (ticks *clock.Clock, changed [2]chan struct{}) {
	ticks = clock.ForPolling(clock.Tick)
	c.DNS.Forward.Clock, c.XDS.Clock = ticks, cmp.Or(c.XDS.Clock, ticks)
	changed = [2]chan struct{}{make(chan struct{}, 1), make(chan struct{}, 1)}
	c.DNS.Forward.AddressesChanged, c.XDS.Changed = changed[0], changed[1]
	return ticks, changed
}

// noteTable is called after a push. large is true if it leaves garbage as large as the table.
func (a *Agent) noteTable(large bool) {
	if large {
		a.memory.note()
	}
	if a.capture != nil {
		a.capture.registrar.Note()
	}
}

// prepareStateDir makes the directory of the snapshot. Without one, a restart while the
// control plane is down loses the mesh names, but all others are still answered. So it is an
// error only if the user has set the directory, which [Config.Validate] checks.
func (c *Config) prepareStateDir() {
	if c.XDS.StateDir == "" || c.StateDirRequired {
		return
	}
	err := statedir.Check(c.XDS.StateDir)
	if err == nil {
		return
	}
	c.Logger.Warn("the table cannot be saved: after a restart without the control plane there are no mesh names; set --state-dir",
		"dir", c.XDS.StateDir, "error", err)
}

// Run answers queries until ctx ends or a client of the status endpoints ends the agent. Then
// it drains: it removes the capture rules and still answers for Config.Drain, because
// Kubernetes ends the containers of a pod at the same time, and the others may still query.
// Finally it closes the listeners and finishes the queries in flight. As a Config.Service it ends without
// a drain. It returns when all of its goroutines have ended. The error is
// nil unless one of them failed.
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
		if err := watchAddresses(serving, a.changed[0], a.changed[1]); err != nil {
			a.log.Info("changes of the host's addresses take effect after up to 10 s", "error", err)
		}
		return nil
	})
	group.Go(func() error { return a.runEgress(serving) })
	group.Go(func() error { return a.runRecords(serving) })
	group.Go(func() error { return a.status.Run(serving) })
	group.Go(func() error {
		a.diagnosis.run(serving)
		return nil
	})
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
		timeout := a.drain(ctx, serving, release)
		<-released
		if timeout > 0 {
			time.AfterFunc(timeout, a.proxy.EndForwarding)
		}
		return nil
	})
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	if a.handOver.Load() && a.capture != nil {
		a.capture.extend(true) // queries in flight were answered until now
	}
	a.log.Info("ended")
	return nil
}

// snapshotTimeout is how long queries wait for the snapshot. Even a large one takes less. A
// disk that hangs must not prevent forwarding.
const snapshotTimeout = 2 * time.Second

// awaitSnapshot waits until the snapshot is in use, if there is one. Under systemd and the
// supervisor, queries wait in the sockets during a restart. Without the table they would be
// forwarded, and nameservers would deny that mesh names exist.
func (a *Agent) awaitSnapshot(ctx context.Context) {
	timer := time.NewTimer(snapshotTimeout)
	defer timer.Stop()
	select {
	case <-a.client.Restored():
	case <-timer.C:
	case <-ctx.Done():
	}
}

// announce closes ready and logs it when queries are answered from a table.
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

// The time for the queries in flight at the end of a service. After a removal no
// reply reaches the clients whose queries were captured. During a restart, all others wait.
const (
	stopTimeout     = 50 * time.Millisecond
	handOverTimeout = time.Second
)

// drain waits until the agent has to end, calls release, which starts to remove the capture
// rules, and then waits for Config.Drain. It returns the limit of the time for the queries in
// flight after the removal, 0 without a limit.
func (a *Agent) drain(ctx, serving context.Context, release func()) time.Duration {
	select {
	case <-ctx.Done():
	case <-a.quitting:
	case <-serving.Done():
		return 0
	}
	a.draining.Store(true)
	a.forgetStarts()
	if a.endSoon() {
		if a.handOver.Load() {
			a.drainEgress(serving)
		}
		a.log.Info("ending without a drain")
		a.endEgress(false)
		release()
		if !a.handOver.Load() {
			return stopTimeout
		}
		a.proxy.HandOver()
		return handOverTimeout
	}
	a.log.Info("draining: queries are still answered", "for", a.config.Drain)
	if a.capture != nil { // in a pod, the rules stay, so connections are accepted until the end
		a.endEgress(true)
	}
	release()
	timer := time.NewTimer(a.config.Drain)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.hastened:
		a.log.Info("drain ended early")
		a.endEgress(false)
	case <-serving.Done():
	}
	return 0
}

// endSoon reports whether the agent ends without a drain: the next one answers on the same
// sockets, or no query is redirected to them any more.
func (a *Agent) endSoon() bool {
	switch handOver := a.handOver.Load(); {
	case !a.config.Service:
		return false
	case a.capture == nil:
		return handOver
	default:
		return a.capture.endSoon(handOver, a.config.DrainCaptured)
	}
}

// Configure is [dnsproxy.Server.Configure], for the settings of the query path.
func (a *Agent) Configure(cfg dnsproxy.Config) error {
	if err := a.proxy.Configure(cfg); err != nil {
		return err
	}
	if a.capture != nil {
		a.capture.registrar.Note() // of other local-only suffixes
	}
	return nil
}

// SetCapture changes which queries are redirected to the agent. It has no effect on an agent
// that was made without a CaptureConfig, or with the current one. On an error, such as a
// required family without listeners, capture changes only once the cause of the error is
// removed.
func (a *Agent) SetCapture(cfg CaptureConfig) error {
	if a.capture == nil || reflect.DeepEqual(cfg, a.capture.current().CaptureConfig) {
		return nil
	}
	return a.capture.change(func(in *inputs) { in.CaptureConfig = cfg })
}

// HandOver ends the agent and leaves the capture rules to the next one. If the kernel does not end
// the capture by itself when no agent follows, the agent removes the rules.
func (a *Agent) HandOver() {
	a.handOver.Store(true)
	a.quit()
}

// Hasten ends the current drain, or the next one, at once. The capture rules are removed
// nevertheless.
func (a *Agent) Hasten() {
	a.hasten()
	if a.draining.Load() {
		a.endEgress(false)
	}
}

// Ready is closed once queries are answered from a table.
func (a *Agent) Ready() <-chan struct{} { return a.ready }

// Clock returns the clock at whose ticks the agent polls.
func (a *Agent) Clock() *clock.Clock { return a.clock }

// Proxy returns the query path.
func (a *Agent) Proxy() *dnsproxy.Server { return a.proxy }

// StatusAddr returns the address of the status endpoints.
func (a *Agent) StatusAddr() string { return a.status.addr() }
