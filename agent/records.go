package agent

import (
	"context"
	"log/slog"
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

// run runs the query log and the dnstap sender until ctx ends.
func (r *records) run(ctx context.Context, proxy *dnsproxy.Server, log *slog.Logger) error {
	var logged, sent part
	defer sent.end()
	defer logged.end()
	for {
		cfg := *r.config.Load()
		logged.restart(ctx, string(cfg.QueryLog), func(ctx context.Context) {
			if cfg.QueryLog != querylog.Off && cfg.QueryLog != "" {
				querylog.Run(ctx, proxy.ReadOwn(cfg.QueryLog.Filter()), proxy.ClusterDomain(), log)
			}
		})
		sent.restart(ctx, cfg.Dnstap.String(), func(ctx context.Context) {
			if cfg.Dnstap != (dnstap.Target{}) {
				r.dnstap.Run(ctx, cfg.Dnstap, proxy.ReadExchanges)
			}
		})
		select {
		case <-r.changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// A part is a goroutine that is started again when its setting changes.
type part struct {
	setting string
	stop    context.CancelFunc // nil before the first restart
	ended   chan struct{}      // closed when the goroutine has ended
}

// restart ends the goroutine and calls the function work in a new goroutine. It does nothing if the part was started
// with the same setting.
func (p *part) restart(ctx context.Context, setting string, work func(context.Context)) {
	if p.stop != nil && p.setting == setting {
		return
	}
	p.end()
	ctx, p.stop = context.WithCancel(ctx)
	p.setting, p.ended = setting, make(chan struct{})
	ended := p.ended
	go func() {
		defer close(ended)
		work(ctx)
	}()
}

// end stops the goroutine and waits until it has ended.
func (p *part) end() {
	if p.stop != nil {
		p.stop()
		<-p.ended
	}
}
