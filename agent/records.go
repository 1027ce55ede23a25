package agent

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/dnstap"
	"github.com/nametap/nametap/agent/querylog"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/chans"
)

// records runs the query log and the dnstap sender as the settings say.
type records struct {
	config  atomic.Pointer[RecordsConfig]
	changed chan struct{} // the method set sends a value, to wake the method run
	dnstap  *dnstap.Sender
}

// newRecords returns the records of an agent with the settings cfg.
func newRecords(cfg *Config, registry prometheus.Registerer) *records {
	r := &records{changed: make(chan struct{}, 1), dnstap: dnstap.New(dnstap.Config{
		Identity: cfg.Identity, Version: cfg.DNS.Version, Resolver: cfg.XDS.Resolver, Logger: cfg.Logger, Registerer: registry,
	})}
	r.config.Store(&cfg.Records)
	return r
}

// set changes the settings.
func (r *records) set(cfg RecordsConfig) {
	r.config.Store(&cfg)
	chans.Wake(r.changed)
}

// run runs the query log and the dnstap sender until ctx ends. It starts both again when the settings change.
func (r *records) run(ctx context.Context, proxy *dnsproxy.Server, log *slog.Logger) error {
	for ctx.Err() == nil {
		cfg := *r.config.Load()
		running, stop := context.WithCancel(ctx)
		var parts sync.WaitGroup
		if cfg.QueryLog != querylog.Off && cfg.QueryLog != "" {
			parts.Go(func() { querylog.Run(running, proxy.ReadOwn(cfg.QueryLog.Filter()), log) })
		}
		if cfg.Dnstap != (dnstap.Target{}) {
			parts.Go(func() { r.dnstap.Run(running, cfg.Dnstap, proxy.ReadMessages) })
		}
		for ctx.Err() == nil && *r.config.Load() == cfg {
			select {
			case <-r.changed:
			case <-ctx.Done():
			}
		}
		stop()
		parts.Wait()
	}
	return nil
}
