package discovery

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/files"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/statedir"
)

const (
	// maxPending is how many changes wait before they are merged. A reason why a server is not ready,
	// such as a missing right, may last for days.
	maxPending = 100
	// checkEvery is how often sources that keep the server from being ready are read without a change: why
	// they do may have changed. It is also how often saving VIPs is tried again.
	checkEvery = time.Second
	// readTimeout bounds how long the Kubernetes API is read for one table.
	readTimeout = 30 * time.Second
)

// An input is a source, and its last reading, whose Changes were not served yet.
type input struct {
	source.Source
	last source.Reading
}

// inputs are the configured sources. If sources have the same object, the first source's is used.
type inputs struct {
	all      []*input
	kube     source.Objects    // nil without the Kubernetes API
	clusters source.Clusters   // nil without other clusters
	missing  map[string]string // why other clusters have no objects in use, by name
	changed  chan struct{}     // has an element when a source may have changed
	read     chan struct{}     // closed when the first reading of each has been served or refused
	readOnce func()            // closes read
}

// newInputs makes the configured sources. They save objects in state, unless it is nil, and call result with the
// result of each step that can fail.
func newInputs(cfg Config, state *statedir.Dir, result func(step string, err error)) (*inputs, error) {
	in := &inputs{changed: make(chan struct{}, 1), read: make(chan struct{})}
	in.readOnce = sync.OnceFunc(func() { close(in.read) })
	changed := func() { notify(in.changed) }
	if cfg.ConfigDir != "" {
		dir, err := files.New(files.Config{
			Dir: cfg.ConfigDir, AllowEmpty: cfg.AllowEmpty, State: state, Debounce: cfg.Debounce,
			Changed: changed, Result: result, Logger: cfg.Logger,
		})
		if err != nil {
			return nil, err
		}
		in.all = append(in.all, &input{Source: dir})
	}
	if cfg.Kubernetes == nil {
		return in, nil
	}
	from := source.ObjectsConfig{RootNamespace: cfg.RootNamespace, Changed: changed, Logger: cfg.Logger}
	var err error
	if cfg.ClustersNamespace != "" {
		if in.clusters, err = newClusters(cfg, state, result, changed); err != nil {
			return nil, err
		}
		from.NetworkOf, from.Selected = cfg.RootNamespace, in.clusters.Select
	}
	if in.kube, err = cfg.Kubernetes.NewObjects(from); err != nil {
		return nil, err
	}
	in.all = append(in.all, &input{Source: in.kube})
	if in.clusters != nil {
		in.all = append(in.all, &input{Source: in.clusters})
	}
	return in, nil
}

// defaultClusterID is what agents call their cluster by default.
const defaultClusterID = "Kubernetes"

// newClusters makes the other clusters.
func newClusters(cfg Config, state *statedir.Dir, result func(step string, err error), changed func()) (source.Clusters, error) {
	if state == nil {
		cfg.Logger.Warn("without a state directory, the hosts of a cluster are missing after a restart while its API server is away (--state-dir)")
	}
	return cfg.Kubernetes.NewClusters(source.ClustersConfig{
		Namespace: cfg.ClustersNamespace, RootNamespace: cfg.RootNamespace, Own: cmp.Or(cfg.ClusterID, defaultClusterID), TokenAudience: cfg.TokenAudience,
		Wait: cfg.ClusterTimeout, State: state, Result: result, Changed: changed, Logger: cfg.Logger,
	})
}

// notify puts an element into a channel that holds at most one.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // there is one already
	}
}

// run runs all sources until ctx ends.
func (in *inputs) run(ctx context.Context) {
	var running sync.WaitGroup
	for _, one := range in.all {
		running.Go(func() { one.Run(ctx) })
	}
	running.Wait()
}

// number returns the number of a source: 0 for the one whose objects are used first.
func (in *inputs) number(of source.Source) int {
	return slices.IndexFunc(in.all, func(one *input) bool { return one.Source == of })
}

// names returns the names of the sources.
func (in *inputs) names() []string {
	var names []string
	for _, one := range in.all {
		names = append(names, one.Name())
	}
	return names
}

// collect reads the sources, and returns what is known of all. Changes have not been served yet.
func (in *inputs) collect() source.Reading {
	all := source.Reading{Read: true}
	for i, one := range in.all {
		one.take(i)
		r := one.last
		all.Changes = append(all.Changes, r.Changes...)
		all.Errors = append(all.Errors, r.Errors...)
		all.Notes = append(all.Notes, r.Notes...)
		all.Kept += r.Kept
		if !r.Read && r.Waiting == "" {
			r.Waiting = one.Name() + " has not been read yet"
		}
		all.Read = all.Read && r.Read
		all.Waiting = cmp.Or(all.Waiting, r.Waiting)
		if r.Missing != nil {
			all.Missing = r.Missing
		}
		if r.Changed != nil {
			all.Changed, all.Heard = r.Changed, r.Heard
		}
	}
	return all
}

// take reads the source, which has a number.
func (one *input) take(number int) {
	pending := one.last.Changes
	one.last = one.Read()
	for _, c := range one.last.Changes {
		if c.Cluster == "" {
			c.Source = number
		}
		pending = append(pending, c)
	}
	if len(pending) > maxPending {
		pending = hosts.Merge(pending)
	}
	one.last.Changes = pending
}

// served notes that all changes are served.
func (in *inputs) served() {
	for _, one := range in.all {
		one.last.Changes = nil
	}
}

// follow serves what changes in the sources until ctx ends. One build serves all changes of Config.Debounce. If a
// build takes longer, half of the time is left to the streams.
func (s *Server) follow(ctx context.Context) {
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
func (s *Server) isServing() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// publish serves what is known of the sources. The first table must be complete, because clients
// would lose the missing hosts.
func (s *Server) publish(all source.Reading) {
	if all.Read {
		defer s.inputs.readOnce()
	}
	s.setErrors(all.Errors) // before a client shows that the reading is in use
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
	s.inputs.served()
	s.push.SetMissing(all.Missing)
	if slices.ContainsFunc(all.Changes, hosts.Change.HasEntry) || len(update.Hosts) > 0 {
		notify(s.writeVIPs) // a status may have to change although no host has
	}
	s.setHeard(all.Heard)
	if !s.isServing() {
		s.waitFor("")
		s.out.Info("serving name tables", "address", s.addr.String(), "sources", s.inputs.names())
		close(s.ready)
	}
}

// waitFor sets why no table is served; empty if tables are.
func (s *Server) waitFor(why string) {
	s.push.WaitFor(why)
	s.setWaiting(why)
}

// setMissing sets which clusters are missing. A cluster is missing until its objects are applied,
// so setMissing runs while changes are.
func (s *Server) setMissing(missing map[string]string) {
	either := map[string]string{}
	maps.Copy(either, missing)
	maps.Copy(either, s.inputs.missing)
	s.push.SetMissing(either)
	s.inputs.missing = missing
}

// saveVIPs saves the VIPs before any client sees them, so that a crash does not lose them. If that fails, for
// example because the disk is full, the VIPs are served all the same, and follow tries again.
func (s *Server) saveVIPs(u hosts.Update) {
	s.vips.unsaved = s.vips.unsaved || u.VIPs
	s.result(stepSave, s.vips.save())
}

// lag is how long a replica may be behind another one by itself: events come to each at another time.
const lag = time.Second

// behind reports whether what is served is older than an encoded revision that was known at a time.
// If so, it has what the API server has sent applied, even if no object changed, or requests what
// was not sent.
func (s *Server) behind(revision []byte, known time.Time) bool {
	r := source.ParseRevision(revision)
	s.mu.Lock()
	heard := s.heard
	s.mu.Unlock()
	switch {
	case heard.Includes(r, known):
		return false
	case s.inputs.kube.Heard().Includes(r, known):
		// Without that check, clients whose revision never comes would make it build all the time.
		notify(s.inputs.changed)
	case time.Since(known) >= lag:
		s.inputs.kube.CatchUp(r, known)
	}
	return true
}
