package discovery

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/discovery/object"
)

// The sources of objects.
const (
	fromDir        = "the configuration directory"
	fromKubernetes = "the Kubernetes API"
)

// An input is the last reading of a source.
type input struct {
	reading reading
	// tooEarly is why the reading must not be the first one that is served, or empty.
	tooEarly string
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
		_ = s.publish(fromKubernetes, reading{objects: from.Objects, errs: from.Errors}, from.Waiting) // it has logged the error
		if from.Waiting == "" {
			s.noteRead(fromKubernetes)
		}
		took = time.Since(began)
	}
}

// noteRead notes that a source was read for the first time, or failed to be.
func (s *Server) noteRead(source string) {
	s.building.Lock()
	defer s.building.Unlock()
	s.read[source] = true
	if len(s.read) == len(s.cfg.sources()) {
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

// publish puts a reading of a source to use, with the last ones of the others. The first readings
// that are served must be complete, because clients would lose the hosts that are missing.
func (s *Server) publish(source string, r reading, tooEarly string) error {
	s.building.Lock()
	defer s.building.Unlock()
	s.inputs[source] = input{reading: r, tooEarly: tooEarly}
	s.built = false
	r, why := combine(s.cfg.sources(), s.inputs)
	if !s.serving && why != "" {
		s.report(r, allocation{})
		s.setWaiting(why)
		return nil
	}
	snap, a := newSnapshot(r.objects, s.cfg.ClusterDomain, s.vips)
	s.report(r, a)
	s.saveVIPsLocked(a)
	s.metrics.observe(r, snap, a)
	if err := s.cache.set(snap); err != nil {
		s.failed(stepBuild, err)
		return err
	}
	s.recovered(stepBuild)
	s.built = true
	if !s.serving {
		s.serving = true
		s.setWaiting("")
		s.cfg.Logger.Info("serving name tables", "address", s.addr.String(), "sources", s.cfg.sources())
		close(s.ready)
	}
	return nil
}

// combine returns the last readings of sources as one, and why they must not be the first ones
// that are served, or an empty string.
func combine(sources []string, inputs map[string]input) (all reading, why string) {
	if len(sources) == 1 {
		only := inputs[sources[0]]
		return only.reading, only.tooEarly
	}
	objects := map[object.Key]object.Object{}
	for _, source := range slices.Backward(sources) {
		in, ok := inputs[source]
		switch {
		case !ok:
			why = source + " has not been read yet"
		case in.tooEarly != "":
			why = in.tooEarly
		}
		for _, o := range in.reading.objects {
			objects[o.Key] = o
		}
		all.errs = append(all.errs, in.reading.errs...)
		all.notes = append(all.notes, in.reading.notes...)
		all.kept += in.reading.kept
	}
	all.objects = slices.SortedFunc(maps.Values(objects), func(a, b object.Object) int { return a.Key.Compare(b.Key) })
	return all, why
}

// readTimeout bounds how long readKubernetes waits.
const readTimeout = 30 * time.Second

// readKubernetes reads all objects of the API server once.
func readKubernetes(ctx context.Context, cfg Config) (reading, error) {
	changed := make(chan struct{}, 1)
	source, err := kube.New(kube.Config{Access: cfg.Kubernetes, Logger: cfg.Logger, Changed: func() { notify(changed) }})
	if err != nil {
		return reading{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	running.Go(func() { source.Run(ctx) })
	for {
		r := source.Read()
		if r.Waiting == "" {
			return reading{objects: r.Objects, errs: r.Errors}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return reading{}, fmt.Errorf("reading %s: %s", fromKubernetes, r.Waiting)
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
