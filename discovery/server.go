package discovery

import (
	"context"
	"crypto/tls"
	"iter"
	"maps"
	"net"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
)

// Server is the control plane. Make one with [New], and call Run once.
type Server struct {
	cfg     Config
	metrics *metrics
	push    *push.Service
	ready   chan struct{}
	// addr is the address for plaintext, and tlsAddr the address for TLS. If only one of the two is served, both fields
	// have its address. They are written before ready is closed.
	addr, tlsAddr net.Addr

	certificate *auth.Server // nil without TLS
	ads         *adsServer
	inputs      *inputs

	*report
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, ready: make(chan struct{})}
	var err error
	if s.certificate, err = cfg.newCertificate(); err != nil {
		return nil, err
	}
	s.ads = newADSServer(cfg, s.certificate)
	if s.inputs, err = newInputs(cfg, func(err error) { s.directoryRead(err) }); err != nil {
		return nil, err
	}
	if s.ads.identities != nil && s.inputs.clusters != nil {
		s.ads.identities.Others = s.inputs.clusters.Tokens
	}
	s.push = push.New(push.Config{
		Hosts: cfg.newHosts(len(s.inputs.all)), FirstRead: s.inputs.read, AckTimeout: cfg.AckTimeout,
		Waiting: func() string { return s.waitingFor() }, Check: s.ads.checkNode, Logger: cfg.Logger, Replica: cfg.Identity,
		Room: func() error { return s.ads.memory.check(tableShare, nil) },
	})
	s.ads.push, s.ads.memory = s.push, newMemoryLimit(cfg.MemoryLimit, s.push.NoMemory, cfg.Logger)
	others := append(s.push.Metrics(), newResourceMetrics(s.Resources), s.ads.conns.Metric())
	s.metrics = newMetrics(cfg.Registerer, append(others, newCertificateMetrics(s.certificate)...)...)
	s.report = newReport(cfg.Logger, s.metrics)
	return s, nil
}

// Ready returns a channel that is closed when the server listens and the first tables are
// built. Before that, no stream is served.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr returns the address on which ADS is served in plaintext or, without plaintext, over TLS. Call it only
// after Ready is closed.
func (s *Server) Addr() net.Addr { return s.addr }

// Waiting returns why the server must not replace another one yet, or "" if it may: it serves no table, or no client has
// been able to use its certificate for TLS.
func (s *Server) Waiting() string {
	if why := s.Problem(); why != nil && !chans.Closed(s.certificate.Valid()) {
		return why.Error()
	}
	return s.waitingFor()
}

// Problem returns an error if clients cannot use the certificate for TLS: it has expired, or is not valid yet.
func (s *Server) Problem() error {
	if s.certificate == nil {
		return nil
	}
	return s.certificate.Problem()
}

// ProxyMetadata returns the environment variables that all proxies of the mesh have (defaultConfig.proxyMetadata).
func (s *Server) ProxyMetadata() map[string]string {
	return s.push.ProxyMetadata()
}

// Replica returns the name of this replica.
func (s *Server) Replica() string { return s.cfg.Identity }

// Agents returns the state of each client of this replica, see [push.Service.Agents].
func (s *Server) Agents(namespace string) iter.Seq[push.Agent] { return s.push.Agents(namespace) }

// Resources returns the state of each resource of the Kubernetes API that is read.
func (s *Server) Resources() []source.Status {
	var all []source.Status
	for _, one := range s.inputs.all {
		all = append(all, one.Status()...)
	}
	return all
}

// Certificate returns the certificate of the server, for a listener of the caller. It has the form of
// [tls.Config.GetCertificate].
func (s *Server) Certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return s.certificate.Certificate(hello)
}

// Run serves the tables of all sources until ctx ends or a listener fails. It returns nil if ctx has ended. All
// its goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	ports, err := s.ads.listen(ctx)
	if err != nil {
		return err
	}
	s.addr, s.tlsAddr = ports[0].listener.Addr(), ports[len(ports)-1].listener.Addr()
	group, ctx := errgroup.WithContext(ctx)
	if s.certificate != nil {
		group.Go(func() error {
			s.certificate.Run(ctx)
			return nil
		})
	}
	group.Go(func() error { return s.ads.serve(ctx, ports) })
	group.Go(func() error {
		s.push.Run(ctx)
		return nil
	})
	group.Go(func() error {
		s.inputs.run(ctx)
		return nil
	})
	group.Go(func() error {
		s.serveChanges(ctx)
		return nil
	})
	return group.Wait()
}

// checkEvery is how often the sources are read while the server is not ready, even without a change: the reason why it
// is not ready may change.
const checkEvery = time.Second

// serveChanges serves the changes of the sources until ctx ends. One build serves all changes that come within
// Config.Debounce. If a build takes longer than that, the pause after it is as long as the build, which leaves half of
// the time to the streams.
func (s *Server) serveChanges(ctx context.Context) {
	timer, took := time.NewTimer(checkEvery), time.Duration(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-s.inputs.changed:
			timer.Reset(max(s.cfg.Debounce, took))
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
		}
		began := time.Now()
		s.publish(s.inputs.collect())
		if took = time.Since(began); !s.isServing() {
			timer.Reset(checkEvery)
		}
	}
}

// isServing reports whether tables are served.
func (s *Server) isServing() bool { return chans.Closed(s.ready) }

// publish serves a reading of all sources. The first table must be complete, because clients
// would lose the missing hosts.
func (s *Server) publish(all source.Reading) {
	if all.Read {
		defer s.inputs.readOnce()
	}
	s.setErrors(all.Errors) // before a client gets a table of this reading
	waits := !s.isServing() && all.Waiting != ""
	// A cluster is missing until its objects are applied. So while changes are applied, clusters that were missing before, or
	// will be missing afterwards, count as missing.
	either := map[string]string{}
	maps.Copy(either, all.Missing)
	maps.Copy(either, s.inputs.missing)
	s.push.SetMissing(either)
	s.inputs.missing = all.Missing
	s.push.Update(all.Changes, func(u hosts.Update, n hosts.Counts) {
		if waits { // what is wrong with hosts may be right when all is read
			u = hosts.Update{}
		} else {
			s.metrics.observe(all.Kept, n)
		}
		s.log(all, u)
	})
	s.push.SetMissing(all.Missing)
	switch {
	case waits:
		s.setWaiting(all.Waiting)
	case !s.isServing():
		s.setWaiting("")
		s.logger.Info("serving name tables", "address", s.addr.String(), "sources", s.inputs.names())
		close(s.ready)
		debug.FreeOSMemory() // the texts of all lists are garbage now, and Go would keep their memory for minutes
	}
}
