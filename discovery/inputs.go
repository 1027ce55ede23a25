package discovery

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// The sources of objects.
const (
	fromDir        = "the configuration directory"
	fromKubernetes = "the Kubernetes API"
	fromClusters   = "the Secrets of other clusters"
)

// maxPending is how many changes wait before they are merged. What keeps a server from being ready, such as
// a missing right, may last for days.
const maxPending = 100

// An input is what is known of the last reading of a source.
type input struct {
	errs  []object.Error
	notes []string // what makes no host, although it is valid
	kept  int      // objects that are used in their last good form
	// tooEarly is why the reading must not be the first one that is served, or empty.
	tooEarly string
	pending  []hosts.Change // what was not served yet
	// changed and heard are those of the reading, for objects of the API server.
	changed source.Revision
	heard   source.Heard
}

// sources returns the configured sources, those first whose objects are used instead of
// the same ones of others.
func (c Config) sources() []string {
	var all []string
	if c.ConfigDir != "" {
		all = append(all, fromDir)
	}
	if c.Kubernetes != nil {
		all = append(all, fromKubernetes)
	}
	return all
}

// awaited returns what must have been read before a table is served.
func (c Config) awaited() []string {
	all := c.sources()
	if c.ClustersNamespace != "" {
		all = append(all, fromClusters)
	}
	return all
}

// sourceIndex returns the number of a source: 0 for the one whose objects are used first.
func (c Config) sourceIndex(name string) int { return slices.Index(c.sources(), name) }

// followKubernetes builds the tables whenever objects of the API server have changed, until ctx
// ends. One build serves all changes of Config.Debounce. If a build takes longer, half of the time
// is left to the streams.
func (s *Server) followKubernetes(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	took := time.Duration(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.changed:
		}
		timer.Reset(max(s.cfg.Debounce, took))
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		began := time.Now()
		from := s.kube.Read()
		change := hosts.Change{Source: s.cfg.sourceIndex(fromKubernetes), Updated: from.Updated, Removed: from.Removed}
		s.publishChanges(fromKubernetes, input{errs: from.Errors, tooEarly: from.Waiting, changed: from.Changed, heard: from.Heard}, change)
		if from.Waiting == "" {
			s.noteRead(fromKubernetes)
		}
		took = time.Since(began)
	}
}

// noteRead notes that a source was read for the first time, or failed to be.
func (s *Server) noteRead(from string) {
	s.building.Lock()
	defer s.building.Unlock()
	s.read[from] = true
	if len(s.read) == len(s.cfg.awaited()) {
		s.readOnce()
	}
}

func (s *Server) isServing() bool {
	s.building.Lock()
	defer s.building.Unlock()
	return s.serving
}

// upToDate reports whether the last readings are served, and their VIPs are saved.
func (s *Server) upToDate() bool {
	s.building.Lock()
	defer s.building.Unlock()
	return s.built && !s.vipsUnsaved
}

// publishAll puts a whole reading of a source to use.
func (s *Server) publishAll(from string, objects []object.Object, in input) {
	s.building.Lock()
	defer s.building.Unlock()
	in.pending = []hosts.Change{s.push.Diff(s.cfg.sourceIndex(from), objects)}
	s.inputs[from] = in
	s.publishLocked()
}

// publishChanges puts what has changed in a source to use.
func (s *Server) publishChanges(from string, in input, changes ...hosts.Change) {
	s.building.Lock()
	defer s.building.Unlock()
	in.pending = append(s.inputs[from].pending, changes...)
	if len(in.pending) > maxPending {
		in.pending = hosts.Merge(in.pending)
	}
	s.inputs[from] = in
	s.publishLocked()
}

// publishLocked puts the pending changes to use. What is served first must be complete, because
// clients would lose the hosts that are missing.
func (s *Server) publishLocked() {
	s.built = false
	all, why := combine(s.cfg.awaited(), s.inputs)
	s.setErrors(all.errs) // before a client shows that the reading is in use
	if !s.serving && why != "" {
		s.report(all, hosts.Update{})
		s.setWaiting(why)
		return
	}
	changes := s.takeLocked()
	from := s.inputs[fromKubernetes]
	update := s.push.Update(changes, from.changed.Encode(), func(u hosts.Update, n hosts.Counts) {
		s.saveVIPsLocked(u)
		s.report(all, u)
		s.metrics.observe(all.kept, n)
	})
	if slices.ContainsFunc(changes, hosts.Change.HasEntry) || len(update.Hosts) > 0 {
		notify(s.writeVIPs) // a status may have to change although no host has
	}
	s.setHeard(from.heard)
	s.built = true
	if !s.serving {
		s.serving = true
		s.setWaiting("")
		s.cfg.Logger.Info("serving name tables", "address", s.addr.String(), "sources", s.cfg.sources())
		close(s.ready)
	}
}

// setHeard sets the state of the API server that what is served includes.
func (s *Server) setHeard(heard source.Heard) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.heard = heard
}

// lag is how long a replica may be behind another one by itself: events come to each at another time.
const lag = time.Second

// behind reports whether what is served is older than an encoded revision that was known at a time. If so, it makes
// sure that what the API server has sent is put to use, also if it has not changed any object, or that it is asked for
// what it has not sent.
func (s *Server) behind(revision []byte, known time.Time) bool {
	r := source.ParseRevision(revision)
	s.mu.Lock()
	heard := s.heard
	s.mu.Unlock()
	switch {
	case heard.Includes(r, known):
		return false
	case s.kube.Heard().Includes(r, known):
		// Without that check, clients whose revision never comes would make it build all the time.
		notify(s.changed)
	case time.Since(known) >= lag:
		s.kube.CatchUp(r, known)
	}
	return true
}

// takeLocked returns the changes of all sources that were not served yet.
func (s *Server) takeLocked() []hosts.Change {
	var changes []hosts.Change
	for from, in := range s.inputs {
		changes = append(changes, in.pending...)
		in.pending = nil
		s.inputs[from] = in
	}
	return changes
}

// combine returns what is known of the last readings of all sources, and why they must not be the
// first ones that are served, or an empty string.
func combine(sources []string, inputs map[string]input) (all input, why string) {
	for _, name := range slices.Backward(sources) {
		in, ok := inputs[name]
		switch {
		case !ok:
			why = name + " has not been read yet"
		case in.tooEarly != "":
			why = in.tooEarly
		}
		all.errs = append(all.errs, in.errs...)
		all.notes = append(all.notes, in.notes...)
		all.kept += in.kept
	}
	return all, why
}

// newKubernetes returns the source at the API server. It calls changed after each change, and selected,
// unless it is nil, with the discovery selectors of the mesh.
func newKubernetes(cfg Config, changed func(), selected func([]string)) (source.Objects, error) {
	from := source.ObjectsConfig{RootNamespace: cfg.RootNamespace, Changed: changed, Selected: selected, Logger: cfg.Logger}
	if cfg.ClustersNamespace != "" {
		from.NetworkOf = cfg.RootNamespace
	}
	return cfg.Kubernetes.NewObjects(from)
}

// readTimeout bounds how long readKubernetes waits.
const readTimeout = 30 * time.Second

// readKubernetes reads all objects of the API server once.
func readKubernetes(ctx context.Context, cfg Config) ([]object.Object, []object.Error, error) {
	changed := make(chan struct{}, 1)
	all, err := newKubernetes(cfg, func() { notify(changed) }, nil)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { all.Run(ctx) })
	objects := map[object.Key]object.Object{}
	for {
		r := all.Read()
		for _, o := range r.Updated {
			objects[o.Key] = o
		}
		for _, key := range r.Removed {
			delete(objects, key)
		}
		if r.Waiting == "" {
			return slices.Collect(maps.Values(objects)), r.Errors, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("reading %s: %s", fromKubernetes, r.Waiting)
		}
	}
}

// notify puts an element into a channel that holds at most one.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // there is one already
	}
}
