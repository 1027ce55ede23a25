package agent

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/nds"
)

// An Agent is one running nametap. [New] makes it, [Agent.Run] runs it.
type Agent struct {
	*core
	status    *statusServer
	diagnosis *diagnosis
	hasten    func()           // closes the channel hastened; may be called any number of times
	hastened  chan struct{}    // closed when the drain must end
	quitting  chan struct{}    // closed when the agent must end
	handOver  atomic.Bool      // whether the rules stay for the next agent
	changed   [2]chan struct{} // tells the query path and the push path that addresses of interfaces have changed
	memory    *memory
	records   *records
	ready     chan struct{} // closed when queries are answered from a table
}

// New checks the configuration, and opens the sockets of the status endpoints and the sockets for VIPs: wrong settings
// are reported before anything runs. If another program uses the port of one of these sockets, Run opens that socket
// later: DNS does not need it.
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
	cfg.DNS.Inherited, cfg.DNS.Logger, cfg.DNS.Registerer = cfg.Inherited, cfg.Logger, registry
	cfg.DNS.Guard = cfg.Guard
	cfg.XDS.Logger, cfg.XDS.Registerer = cfg.Logger, registry
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.prepareStateDir()
	cfg.DNS.Forward.Control = probe.SetHops(queryHops)
	pollClock, changed := cfg.setClock()
	proxy, err := dnsproxy.New(cfg.DNS)
	if err != nil {
		return nil, err
	}
	a := &Agent{
		core:     &core{config: cfg, log: cfg.Logger, proxy: proxy, clock: pollClock},
		quitting: make(chan struct{}),
		hastened: make(chan struct{}),
		changed:  changed,
		ready:    make(chan struct{}),
	}
	cfg.XDS.Resolver = controlResolver(proxy.Ready(), proxy.Upstreams, func() []netip.AddrPort { return addrPorts(proxy) })
	a.records = newRecords(&cfg, registry)
	cfg.XDS.Handled = func() { a.memory.postpone() }
	a.client, err = nds.New(cfg.XDS, proxy.Load)
	if err != nil {
		return nil, err
	}
	a.silent.Store(new([]string))
	a.quit = sync.OnceFunc(func() { close(a.quitting) })
	a.hasten = sync.OnceFunc(func() { close(a.hastened) })
	if cfg.Capture != nil {
		if a.capture, err = newCapture(cfg, proxy, pollClock); err != nil {
			return nil, err
		}
		a.capture.registrar = newRegistrar(a.core, a.capture, cfg.Capture.Config.Interval)
	}
	registry.MustRegister(captureMetrics{a.capture}, guardMetrics{a.core})
	if a.vips, err = newVIPCarrier(ctx, a.core); err != nil {
		return nil, err
	}
	a.diagnosis = &diagnosis{core: a.core, unserved: func() []string { return a.status.unserved() }}
	if a.status, err = newStatusServer(ctx, a.diagnosis, registry); err != nil {
		return nil, err
	}
	registry.MustRegister(a.diagnosis)
	return a, cfg.Inherited.Close(cfg.Logger)
}

// Run answers queries until ctx ends or a client of the status endpoints ends the agent. Then Run drains: it removes
// the capture rules, and still answers queries for the time Config.Drain. Kubernetes ends all containers of a pod at
// the same time, and the other containers may still send queries. Finally Run closes the listeners and finishes the
// queries in flight. An agent with Config.Service does not drain if the next agent answers on the same sockets, or if
// no query is redirected to this agent any more. Run returns when all of its goroutines have ended. It returns an error
// if one of them failed.
func (a *Agent) Run(ctx context.Context) error {
	a.started = time.Now()
	a.memory = newMemory()
	defer a.memory.timer.Stop()
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, serving := errgroup.WithContext(serving)
	group.Go(func() error {
		a.awaitSnapshot(serving)
		return a.proxy.Run(serving)
	})
	group.Go(func() error { return a.client.Run(serving) })
	group.Go(func() error {
		if err := watchAddresses(serving, a.changed[0], a.changed[1]); err != nil {
			a.log.Info("changes of the host's addresses take effect after up to 10 s", "error", err)
		}
		return nil
	})
	group.Go(func() error { return a.vips.run(serving) })
	group.Go(func() error { return a.records.run(serving, a.proxy, a.log) })
	group.Go(func() error { return keepGuardRecords(serving, a.core, a.memory.postpone) })
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
	group.Go(func() error { return notifySystemd(serving, a.core) })
	group.Go(func() error { return watchListeners(serving, a.core) })
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
		a.capture.extend(true) // renews the lease of the rules until the next agent does so
	}
	a.log.Info("ended")
	return nil
}

// snapshotTimeout is how long queries wait for the snapshot, the table that a previous agent has saved on disk. Reading
// even a large snapshot takes less time. A disk that hangs must not prevent forwarding.
const snapshotTimeout = 2 * time.Second

// awaitSnapshot waits until the snapshot is in use, if there is a snapshot. Under systemd and the supervisor, queries
// wait in the sockets during a restart. Without a table, the agent would forward these queries, and nameservers would
// answer that mesh names do not exist.
func (a *Agent) awaitSnapshot(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, snapshotTimeout)
	defer cancel()
	select {
	case <-a.client.Restored():
	case <-ctx.Done():
	}
}

// announce waits until queries are answered from a table. Then it closes the channel ready, and logs that the agent is
// ready.
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

// stopTimeout is how long queries in flight may take at the end of an agent with Config.Service that has removed its
// rules. It is short, because replies no longer reach the clients whose queries were captured.
const stopTimeout = 50 * time.Millisecond

// drain waits until the agent must end. Then it calls the function release, which starts to remove the capture rules,
// and waits for the time Config.Drain. It returns how long queries in flight may take after that; 0 means no limit.
func (a *Agent) drain(ctx, serving context.Context, release func()) time.Duration {
	select {
	case <-ctx.Done():
	case <-a.quitting:
	case <-serving.Done():
		return 0
	}
	a.draining.Store(true)
	forgetStarts(a.log)
	if a.endSoon() {
		if a.handOver.Load() {
			a.vips.drain(serving, a.hastened)
		}
		a.log.Info("ending without a drain")
		a.vips.end(false)
		release()
		if !a.handOver.Load() {
			return stopTimeout
		}
		a.proxy.HandOver()
		return handOverTimeout
	}
	a.log.Info("draining: queries are still answered", "for", a.config.Drain)
	// In a pod, a.capture is nil: another process has installed the rules, and they stay. So the agent accepts
	// connections to VIPs until its end.
	if a.capture != nil {
		a.vips.end(true)
	}
	release()
	timer := time.NewTimer(a.config.Drain)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.hastened:
		a.log.Info("drain ended early")
		a.vips.end(false)
	case <-serving.Done():
	}
	return 0
}

// endSoon reports whether the agent ends without a drain: the next agent answers on the same
// sockets, or no query is redirected to these sockets any more.
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

// Configure changes the settings of the query path: see [dnsproxy.Server.Configure].
func (a *Agent) Configure(cfg dnsproxy.Config) error { return a.proxy.Configure(cfg) }

// SetCapture changes which queries are redirected to the agent. It has no effect on an agent that was made without a
// CaptureConfig, or if cfg equals the current CaptureConfig. It returns an error, for example, if the agent listens
// over no family that cfg captures. Then capture stays as it was until the cause of the error is removed.
func (a *Agent) SetCapture(cfg CaptureConfig) error {
	if a.capture == nil || reflect.DeepEqual(cfg, a.capture.current().CaptureConfig) {
		return nil
	}
	return a.capture.change(func(in *inputs) { in.CaptureConfig = cfg })
}

// SetRecords changes where the records of queries go. It returns at once.
func (a *Agent) SetRecords(cfg RecordsConfig) { a.records.set(cfg) }

// HandOver ends the agent and leaves the capture rules to the next agent. It leaves only rules with a lease: if no
// agent follows, the lease expires, and the kernel ends their capture. Rules without a lease are removed, unless
// FailClosed of the [iptables.Config] keeps them.
func (a *Agent) HandOver() {
	a.handOver.Store(true)
	a.quit()
}

// Hasten ends the current drain at once. If there is none yet, the next drain ends at once. The agent still removes
// the capture rules.
func (a *Agent) Hasten() {
	a.hasten()
	if a.draining.Load() {
		a.vips.end(false)
	}
}

// Ready returns a channel that is closed when queries are answered from a table.
func (a *Agent) Ready() <-chan struct{} { return a.ready }

// Clock returns the clock that tells the agent when to poll.
func (a *Agent) Clock() *clock.Clock { return a.clock }

// Proxy returns the query path.
func (a *Agent) Proxy() *dnsproxy.Server { return a.proxy }

// StatusAddr returns the address of the status endpoints.
func (a *Agent) StatusAddr() string { return a.status.addr() }
