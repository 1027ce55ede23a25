package discovery

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// The steps that can fail while the server runs: the values of the label "step" of the
// failure metric.
const (
	stepRead        = "read"
	stepWatch       = "watch"
	stepSave        = "save"
	stepSaveObjects = "save_objects"
	stepSaveCluster = "save_cluster"
)

// saveObjectsEvery bounds how often the last good objects are written: they can be tens of
// megabytes, and a directory can change many times a second.
const saveObjectsEvery = 5 * time.Second

// slowRead is when a read is reported as slow. A network file system whose server is away
// may never return.
const slowRead = 15 * time.Second

// rebuildOnChange builds the tables, and builds them again whenever the directory changes,
// until ctx ends. It fails only if the directory cannot be read at the start, for a
// permanent reason.
func (s *Server) rebuildOnChange(ctx context.Context) error {
	w := newWatcher(s.cfg.Debounce)
	defer w.close()
	defer s.saveObjectsNow()
	next, err := s.rebuild(w)
	if err != nil && !s.isServing() && isPermanent(err) {
		return err
	}
	for {
		if s.objectsUnsaved {
			next = min(next, max(0, saveObjectsEvery-time.Since(s.objectsSaved)))
		}
		w.wait(ctx, next)
		select {
		case <-ctx.Done():
			return nil
		default:
		}
		next, _ = s.rebuild(w) // rebuild has logged the error
	}
}

// rebuild builds until all directories are watched. It returns when to read the directory
// again if nothing changes, and the last error, which it has logged.
func (s *Server) rebuild(w *watcher) (time.Duration, error) {
	for {
		r, err := s.build()
		s.noteRead(fromDir)
		again, watchErr := w.sync(r.watch)
		if watchErr != nil {
			s.failed(stepWatch, watchErr)
		} else {
			s.recovered(stepWatch)
		}
		switch {
		case again:
			// Changes before the new watch was in place were not noticed.
			continue
		case err != nil || watchErr != nil || r.unsettled || r.transient:
			return retryEvery, err
		default:
			return rescanEvery, nil
		}
	}
}

// failed counts a failure, and logs it unless the step has failed since it last worked.
func (s *Server) failed(step string, err error) {
	s.metrics.failures.WithLabelValues(step).Inc()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.logged[step] {
		s.logged[step] = true
		s.cfg.Logger.Error(failureMessage(step)+"; the current tables stay", "error", err)
	}
}

func failureMessage(step string) string {
	switch step {
	case stepRead:
		return "cannot read the configuration directory"
	case stepWatch:
		return "cannot watch the configuration directory"
	case stepSave:
		return "cannot save the automatic VIPs"
	case stepSaveObjects:
		return "cannot save the last good objects"
	}
	return "cannot save the objects of a cluster"
}

// recovered makes failed log the next failure of a step.
func (s *Server) recovered(step string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.logged, step)
}

// build reads the directory and serves its tables.
func (s *Server) build() (reading, error) {
	slow := time.AfterFunc(slowRead, func() {
		s.metrics.failures.WithLabelValues(stepRead).Inc()
		s.cfg.Logger.Error("reading the configuration directory takes long; the current tables stay", "so_far", slowRead)
	})
	r, err := s.dir.read()
	slow.Stop()
	s.setDirErr(err)
	if err != nil {
		s.failed(stepRead, err)
		if s.isServing() || len(s.dir.good) == 0 {
			return r, err
		}
		// The process has just started: serve the last good objects of the previous one.
		r.objects, r.kept = s.dir.objects(), len(s.dir.good)
		s.serve(r)
		return r, err
	}
	s.recovered(stepRead)
	s.metrics.lastRead.SetToCurrentTime()
	if r.same && s.upToDate() {
		s.saveObjects()
		return r, nil
	}
	s.serve(r)
	return r, nil
}

// setDirErr records whether the configuration directory could be read.
func (s *Server) setDirErr(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dirErr = nil
	if err != nil {
		s.dirErr = &object.Error{File: rootName, Msg: "cannot be read: " + plainError(err), Kept: len(s.dir.good) > 0}
	}
}

// serve puts the tables of a reading of the directory to use.
func (s *Server) serve(r reading) {
	s.publishAll(fromDir, r.objects, input{errs: r.errs, notes: r.notes, kept: r.kept, tooEarly: s.tooEarly(r)})
	if s.state != nil && s.isServing() {
		s.objectsUnsaved = true
		s.saveObjects()
	}
}

// tooEarly returns why a reading must not be the first one that is served, or "".
func (s *Server) tooEarly(r reading) string {
	switch {
	case len(r.objects) == 0 && !s.cfg.AllowEmpty:
		return fmt.Sprintf("the configuration directory %s holds no usable object: "+
			"add one, or start with --allow-empty if that is intended", s.cfg.ConfigDir)
	case r.transient && r.kept == 0:
		return fmt.Sprintf("a part of the configuration directory %s could not be read: see /debug/errors", s.cfg.ConfigDir)
	}
	return ""
}

// setWaiting records why the server is not ready, and logs it if it has changed.
func (s *Server) setWaiting(why string) {
	s.mu.Lock()
	previous := s.waiting
	s.waiting = why
	s.mu.Unlock()
	s.push.WaitFor(why)
	if why != "" && why != previous {
		s.cfg.Logger.Warn("not ready, no stream is served", "because", why)
	}
}

// saveVIPsLocked saves the VIPs before any client sees them, so that a crash does not lose
// them. If that fails, for example because the disk is full, the VIPs are served all the
// same, and the next build tries again.
func (s *Server) saveVIPsLocked(u hosts.Update) {
	if s.state == nil {
		return
	}
	if s.vipsUnsaved = s.vipsUnsaved || u.VIPs; !s.vipsUnsaved {
		return
	}
	if err := saveVIPs(s.state, s.vips); err != nil {
		s.failed(stepSave, err)
		return
	}
	s.vipsUnsaved = false
	s.recovered(stepSave)
}

// saveObjects saves the last good objects if they have changed, but not more often than
// every saveObjectsEvery.
func (s *Server) saveObjects() {
	if time.Since(s.objectsSaved) >= saveObjectsEvery {
		s.saveObjectsNow()
	}
}

// saveObjectsNow saves the last good objects if they have changed.
func (s *Server) saveObjectsNow() {
	if !s.objectsUnsaved {
		return
	}
	s.objectsSaved = time.Now()
	if err := saveObjects(s.state, s.dir.good); err != nil {
		s.failed(stepSaveObjects, err)
		return
	}
	s.objectsUnsaved = false
	s.recovered(stepSaveObjects)
}

// setErrors publishes the errors of a reading.
func (s *Server) setErrors(errs []object.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errs = slices.Clone(errs)
	s.metrics.broken.Set(float64(len(errs)))
}

// report logs what is new in a reading, and in what follows from it. A document that stays
// broken is logged once, and again if it was repaired and breaks again.
func (s *Server) report(r input, u hosts.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	logged := map[string]bool{}
	logNew := func(id string, log func()) {
		if logged[id] = true; !s.logged[id] {
			log()
		}
	}
	for _, e := range r.errs {
		logNew("document "+e.Error(), func() {
			s.cfg.Logger.Error("broken document", "error", e, "kept_last_good", e.Kept)
		})
	}
	for _, note := range r.notes {
		logNew("note "+note, func() { s.cfg.Logger.Info("an object makes no host", "what", note) })
	}
	for _, host := range u.Loops {
		logNew("loop "+host, func() {
			s.cfg.Logger.Error("a Service of type ExternalName stands for itself and is left out: change its spec.externalName", "host", host)
		})
	}
	for _, host := range u.WithoutVIP {
		logNew("no vip "+host, func() { s.cfg.Logger.Error("no automatic VIP is left", "host", host) })
	}
	for _, host := range u.Moved {
		s.cfg.Logger.Warn("another object claims the automatic VIP, the host gets a new one", "host", host)
	}
	for _, step := range []string{stepRead, stepWatch, stepSave, stepSaveObjects, stepSaveCluster} {
		if s.logged[step] {
			logged[step] = true
		}
	}
	s.logged = logged
}
