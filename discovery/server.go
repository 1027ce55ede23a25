package discovery

import (
	"context"
	"crypto/tls"
	"errors"
	"iter"
	"maps"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
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

	certificate certificate
	ads         *adsServer
	inputs      *inputs
	vips        vips          // owned by the goroutine of serveChanges
	writer      source.Writer // nil without a Lease
	writeVIPs   chan struct{} // has an element when VIPs may have to be written
	proxies     atomic.Value  // the map of ProxyMetadata

	*report
}

// New checks the configuration, locks the state directory and reads it. Run releases the
// lock when it returns.
func New(cfg Config) (server *Server, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, ready: make(chan struct{}), writeVIPs: make(chan struct{}, 1)}
	if s.vips, err = openVIPs(cfg.StateDir, cfg.Logger); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.vips.close()
		}
	}()
	if s.certificate, err = newCertificate(cfg); err != nil {
		return nil, err
	}
	if s.ads, err = newADSServer(cfg, s.certificate.server); err != nil {
		return nil, err
	}
	if s.inputs, err = newInputs(cfg, s.vips.dir, func(step string, err error) { s.result(step, err) }); err != nil {
		return nil, err
	}
	if s.ads.identities != nil && s.inputs.clusters != nil {
		s.ads.identities.Others = s.inputs.clusters.Tokens
	}
	s.push = push.New(push.Config{
		Hosts: cfg.newHosts(len(s.inputs.all), s.vips.VIPs), FirstRead: s.inputs.read, AckTimeout: cfg.AckTimeout,
		Check: s.ads.checkNode, Behind: s.behind, Logger: cfg.Logger, Replica: cfg.Identity,
		Room:       func() error { return s.ads.memory.check(tableShare) },
		Comparable: cfg.ConfigDir == "" && cfg.ClustersNamespace == "", // revisions come from the own API server
	})
	s.ads.push, s.ads.memory = s.push, newMemoryLimit(cfg.MemoryLimit, s.push.NoMemory, cfg.Logger)
	if s.writer, err = s.newWriter(); err != nil {
		return nil, err
	}
	others := append(s.push.Metrics(), newResourceMetrics(s.Resources), newLeaseMetric(s.holdsLease), newUnreadMetric(s.ads.conns), s.ads.conns.Metric())
	if s.metrics, err = newMetrics(cfg.Registerer, append(others, s.certificate.metrics()...)...); err != nil {
		return nil, err
	}
	s.report = newReport(cfg.Logger, s.metrics)
	return s, nil
}

// Ready returns a channel that is closed when the server listens and the first tables are
// built. Before that, no stream is served.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Addr returns the address on which ADS is served in plaintext or, without plaintext, over TLS. Call it only
// after Ready is closed.
func (s *Server) Addr() net.Addr { return s.addr }

// Waiting returns why the server is not ready, or "" if it is.
func (s *Server) Waiting() string {
	if why := s.certificate.waiting(); why != "" {
		return why
	}
	return s.waitingFor()
}

// ProxyMetadata returns the environment variables that all proxies of the mesh have (defaultConfig.proxyMetadata).
func (s *Server) ProxyMetadata() map[string]string {
	variables, _ := s.proxies.Load().(map[string]string)
	return variables
}

// Replica returns the name of this replica.
func (s *Server) Replica() string { return s.cfg.Identity }

// Agents returns the state of each client of this replica, see [push.Service.Agents].
func (s *Server) Agents(namespace string) iter.Seq[push.Agent] { return s.push.Agents(namespace) }

// Errors returns the errors in objects, and in the directories and API servers from which they are read. Errors in the
// configuration directory are sorted by file and line.
func (s *Server) Errors() []object.Error { return s.errors() }

// Resources returns the state of each resource of the Kubernetes API that is read.
func (s *Server) Resources() []source.Status {
	var all []source.Status
	for _, one := range s.inputs.all {
		all = append(all, one.Status()...)
	}
	if s.certificate.secret != nil {
		all = append(all, s.certificate.secret.Status()...)
	}
	return all
}

// Certificate returns the certificate of the server, for a listener of the caller. It has the form of
// [tls.Config.GetCertificate].
func (s *Server) Certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	return s.certificate.server.Certificate(hello)
}

// Run serves the tables of all sources until ctx ends or a listener fails. It returns nil if ctx has ended. All
// its goroutines have ended when it returns.
func (s *Server) Run(ctx context.Context) error {
	defer s.vips.close()
	ports, err := s.ads.listen(ctx)
	if err != nil {
		return err
	}
	s.addr, s.tlsAddr = ports[0].listener.Addr(), ports[len(ports)-1].listener.Addr()
	group, ctx := errgroup.WithContext(ctx)
	s.certificate.await(ctx, group)
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
	if s.writer != nil {
		group.Go(func() error { return s.runWriter(ctx) })
	}
	return group.Wait()
}

// checkEvery is how often the sources are read while the server is not ready, even without a change: the reason why it
// is not ready may change. It is also the time between two tries to save VIPs.
const checkEvery = time.Second

// serveChanges serves the changes of the sources until ctx ends. One build serves all changes that come within
// Config.Debounce. If a build takes longer than that, the pause after it is as long as the build, which leaves half of
// the time to the streams.
func (s *Server) serveChanges(ctx context.Context) {
	timer, took := time.NewTimer(checkEvery), time.Duration(0)
	defer timer.Stop()
	for {
		changed := false
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-s.inputs.changed:
			changed = true
			timer.Reset(max(s.cfg.Debounce, took))
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
		}
		began := time.Now()
		if changed || !s.isServing() {
			s.publish(s.inputs.collect())
		} else {
			s.result(stepSave, s.vips.save())
		}
		if took = time.Since(began); !s.isServing() || s.vips.unsaved {
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
	if !s.isServing() && all.Waiting != "" {
		s.log(all, hosts.Update{})
		s.waitFor(all.Waiting)
		return
	}
	s.setMissing(all.Missing)
	update := s.push.Update(all.Changes, all.Changed.Encode(), func(u hosts.Update, n hosts.Counts) {
		s.saveVIPs(u)
		s.log(all, u)
		s.metrics.observe(all.Kept, n)
	})
	s.proxies.Store(s.push.ProxyMetadata())
	s.inputs.served()
	s.push.SetMissing(all.Missing)
	if slices.ContainsFunc(all.Changes, hosts.Change.HasEntry) || len(update.Hosts) > 0 {
		chans.Wake(s.writeVIPs) // a status may have to change although no host has changed
	}
	s.setHeard(all.Heard)
	if !s.isServing() {
		s.waitFor("")
		s.logger.Info("serving name tables", "address", s.addr.String(), "sources", s.inputs.names())
		close(s.ready)
	}
}

// waitFor sets the reason why no table is served; empty if tables are served.
func (s *Server) waitFor(reason string) {
	s.push.WaitFor(reason)
	s.setWaiting(reason)
}

// setMissing sets which clusters are missing. A cluster is missing until its objects are applied. So while changes are
// applied, clusters that were missing before, or will be missing afterwards, count as missing.
func (s *Server) setMissing(missing map[string]string) {
	either := map[string]string{}
	maps.Copy(either, missing)
	maps.Copy(either, s.inputs.missing)
	s.push.SetMissing(either)
	s.inputs.missing = missing
}

// saveVIPs saves the VIPs before a client sees them, so a crash loses no VIP that a client has seen. If saving fails,
// for example because the disk is full, the VIPs are served all the same, and serveChanges tries again.
func (s *Server) saveVIPs(u hosts.Update) {
	s.vips.unsaved = s.vips.unsaved || u.VIPs
	s.result(stepSave, s.vips.save())
}

// replicaLag is how long a replica may normally be behind another one: events reach replicas at different times.
const replicaLag = time.Second

// behind reports whether the served tables may be older than revision, which a client had at the time heldAt. If they
// may be, behind also helps to catch up. If the API server has already sent what is missing, behind makes serveChanges
// serve it. If the API server has not sent it within replicaLag, behind lists the resources again.
func (s *Server) behind(revision []byte, heldAt time.Time) bool {
	r := source.ParseRevision(revision)
	s.mu.Lock()
	heard := s.heard
	s.mu.Unlock()
	switch {
	case heard.Includes(r, heldAt):
		return false
	case s.inputs.kube.Heard().Includes(r, heldAt):
		// In other cases serveChanges is not woken: a client whose revision never comes would cause builds all the time.
		chans.Wake(s.inputs.changed)
	case time.Since(heldAt) >= replicaLag:
		s.inputs.kube.CatchUp(r, heldAt)
	}
	return true
}

// newWriter returns the writer of automatic VIPs, or nil if none is wanted.
func (s *Server) newWriter() (source.Writer, error) {
	if s.cfg.Lease == (source.Name{}) {
		return nil, nil //nolint:nilnil // there is none
	}
	if s.cfg.Identity == "" {
		return nil, errors.New("this replica needs a name in the Lease, and the machine has none")
	}
	number := s.inputs.number(s.inputs.kube)
	return s.cfg.Kubernetes.NewWriter(source.WriterConfig{
		Lease: s.cfg.Lease, Identity: s.cfg.Identity, RootNamespace: s.cfg.RootNamespace,
		Wanted:  func() map[object.Key]object.VIPStatus { return s.push.Statuses(number) },
		Changed: s.writeVIPs, Logger: s.cfg.Logger,
	})
}

// runWriter waits until all objects are known, and then writes automatic VIPs until ctx ends.
func (s *Server) runWriter(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.ready:
		s.writer.Run(ctx)
		return nil
	}
}

// holdsLease reports whether this replica may write automatic VIPs.
func (s *Server) holdsLease() bool { return s.writer != nil && s.writer.Holds() }
