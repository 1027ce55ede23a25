package agent

import (
	"context"
	"log/slog"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/agent/dnstap"
	"github.com/nametap/nametap/agent/querylog"
	"github.com/nametap/nametap/dnsproxy"
)

// records is where the records of queries go, and what sends them there.
type records struct {
	config  atomic.Pointer[RecordsConfig]
	changed chan struct{} // has a value after a change of config
	dnstap  *dnstap.Sender
}

// newRecords returns the records of an agent with a Config.
func newRecords(cfg *Config, registry prometheus.Registerer) *records {
	r := &records{changed: make(chan struct{}, 1), dnstap: dnstap.New(dnstap.Config{
		Identity: cfg.Identity, Version: cfg.DNS.Version, Resolver: cfg.XDS.Resolver, Logger: cfg.Logger, Registerer: registry,
	})}
	r.config.Store(&cfg.Records)
	return r
}

// set changes where the records of queries go.
func (r *records) set(cfg RecordsConfig) {
	r.config.Store(&cfg)
	select {
	case r.changed <- struct{}{}:
	default: // run has yet to receive a change that it has not loaded
	}
}

// run sends the records of queries where the settings say, until ctx ends.
func (r *records) run(ctx context.Context, proxy *dnsproxy.Server, log *slog.Logger) error {
	var logged, sent part
	defer sent.end()
	defer logged.end()
	for {
		cfg := *r.config.Load()
		logged.run(ctx, string(cfg.QueryLog), func(ctx context.Context) {
			if cfg.QueryLog != querylog.Off && cfg.QueryLog != "" {
				querylog.Run(ctx, proxy.ReadOwn(cfg.QueryLog.Filter()), proxy.ClusterDomain(), log)
			}
		})
		sent.run(ctx, cfg.Dnstap.String(), func(ctx context.Context) {
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

// A part runs by a setting that may change.
type part struct {
	setting string
	stop    context.CancelFunc // nil: not running
	ended   chan struct{}
}

// run makes the part run by a setting: the previous run ends if the setting differs.
func (p *part) run(ctx context.Context, setting string, run func(context.Context)) {
	if p.stop != nil && p.setting == setting {
		return
	}
	p.end()
	ctx, p.stop = context.WithCancel(ctx)
	p.setting, p.ended = setting, make(chan struct{})
	ended := p.ended
	go func() {
		defer close(ended)
		run(ctx)
	}()
}

// end ends the part and waits until it has ended.
func (p *part) end() {
	if p.stop != nil {
		p.stop()
		<-p.ended
	}
}
