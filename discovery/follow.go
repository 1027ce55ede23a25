package discovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// The steps that can fail while the server runs, as the metrics call them.
const (
	stepRead        = "read"
	stepWatch       = "watch"
	stepSave        = "save"
	stepSaveObjects = "save_objects"
	stepBuild       = "build"
)

// saveObjectsEvery bounds how often the last good objects are written: they
// can be tens of megabytes, and a directory can change many times a second.
const saveObjectsEvery = 5 * time.Second

// slowRead is when a reading is said to hang, as one of a network file system
// whose server is away does.
const slowRead = 15 * time.Second

// follow builds, and builds again whenever the directory changes, until ctx
// ends. It fails only if the directory can lastingly not be read at the start.
func (s *Server) follow(ctx context.Context) error {
	w := newWatcher(s.cfg.Debounce)
	defer w.close()
	defer s.saveObjectsNow()
	next, err := s.rebuild(w)
	if err != nil && !s.serving && isPermanent(err) {
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
		next, _ = s.rebuild(w) // said already
	}
}

// rebuild builds until all directories are watched. It returns when to look
// again if no change is seen before. The error is the last one; it was said.
func (s *Server) rebuild(w *watcher) (time.Duration, error) {
	for {
		r, err := s.build()
		again, werr := w.sync(r.watch)
		if werr != nil {
			s.failed(stepWatch, werr)
		} else {
			s.recovered(stepWatch)
		}
		switch {
		case again:
			// What was written before the watch was in place has gone unnoticed.
			continue
		case err != nil || werr != nil || r.unsettled || r.transient:
			return retryEvery, err
		default:
			return rescanEvery, nil
		}
	}
}

// failed says once what goes wrong again and again.
func (s *Server) failed(step string, err error) {
	s.metrics.failures.WithLabelValues(step).Inc()
	if !s.seen[step] {
		s.seen[step] = true
		s.cfg.Logger.Error("cannot "+step+"; the last tables stay", "error", err)
	}
}

// recovered lets the next failure of a step be said again.
func (s *Server) recovered(step string) { delete(s.seen, step) }

// build reads the directory and makes its tables effective.
func (s *Server) build() (reading, error) {
	slow := time.AfterFunc(slowRead, func() {
		s.metrics.failures.WithLabelValues(stepRead).Inc()
		s.cfg.Logger.Error("reading the configuration directory takes long; the last tables stay", "so_far", slowRead)
	})
	r, err := s.source.read()
	slow.Stop()
	s.directory(err)
	if err != nil {
		s.failed(stepRead, err)
		if s.serving || len(s.source.good) == 0 {
			return r, err
		}
		// The last good objects of the process before are better than none.
		r.objects, r.kept = s.source.objects(), len(s.source.good)
		return r, errors.Join(err, s.serve(r))
	}
	s.recovered(stepRead)
	s.metrics.lastRead.SetToCurrentTime()
	if r.same && s.built && !s.unsaved {
		s.saveObjects()
		return r, nil
	}
	return r, s.serve(r)
}

// directory publishes whether the configuration directory can be read.
func (s *Server) directory(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dirErr = nil
	if err != nil {
		s.dirErr = &DocumentError{File: rootName, Msg: "cannot be read: " + plainError(err), Kept: len(s.source.good) > 0}
	}
}

// serve makes the tables of a reading effective. Before the first tables the
// reading must be a whole one; a client must not lose hosts to a partial one.
func (s *Server) serve(r reading) error {
	s.built = false
	if !s.serving {
		if why := s.tooEarly(r); why != "" {
			s.report(r, allocation{})
			s.wait(why)
			return nil
		}
	}
	snap, a := snapshotOf(r.objects, s.cfg.ClusterDomain, s.vips)
	s.report(r, a)
	s.remember(a)
	s.metrics.observe(r, snap, a)
	if err := s.cache.set(snap); err != nil {
		s.failed(stepBuild, err)
		return err
	}
	s.recovered(stepBuild)
	s.built = true
	s.objectsUnsaved = s.state != nil
	s.saveObjects()
	if !s.serving {
		s.serving = true
		s.wait("")
		s.cfg.Logger.Info("serving name tables", "address", s.addr.String(), "config_dir", s.cfg.ConfigDir)
		close(s.ready)
	}
	return nil
}

// tooEarly says why a reading is not to be the first that is served, or "".
func (s *Server) tooEarly(r reading) string {
	switch {
	case len(r.objects) == 0 && !s.cfg.AllowEmpty:
		return fmt.Sprintf("the configuration directory %s holds no object that can be used: "+
			"fill it, or start with --allow-empty if that is meant", s.cfg.ConfigDir)
	case r.transient && r.kept == 0:
		return fmt.Sprintf("the configuration directory %s could only be read in part: /debug/errors says which part",
			s.cfg.ConfigDir)
	}
	return ""
}

// wait publishes why the server is not ready, and says it if it is new.
func (s *Server) wait(why string) {
	s.mu.Lock()
	before := s.waiting
	s.waiting = why
	s.mu.Unlock()
	s.cache.waitingFor(why)
	if why != "" && why != before {
		s.cfg.Logger.Warn("not ready, and no stream is served", "because", why)
	}
}

// snapshotOf builds what is served from objects; v is the only thing changed.
func snapshotOf(objects []object, domain string, v *vips) (*snapshot, allocation) {
	claims := buildClaims(objects, domain)
	a := v.allocate(wantedVIPs(claims), claimedSlots(claims))
	return &snapshot{claims: claims, slots: a.slots}, a
}

// remember writes the VIPs before any client sees them: a crash must not
// forget what was given out. A disk that is full must not stop the service
// either, so a failure is said and tried again at the next build.
func (s *Server) remember(a allocation) {
	if s.state == nil {
		return
	}
	if s.unsaved = s.unsaved || a.changed; !s.unsaved {
		return
	}
	if err := s.vips.save(s.state); err != nil {
		s.failed(stepSave, err)
		return
	}
	s.unsaved = false
	s.recovered(stepSave)
}

// saveObjects writes the last good objects if they changed and were not
// written a moment ago.
func (s *Server) saveObjects() {
	if time.Since(s.objectsSaved) >= saveObjectsEvery {
		s.saveObjectsNow()
	}
}

// saveObjectsNow writes the last good objects if they changed.
func (s *Server) saveObjectsNow() {
	if !s.objectsUnsaved {
		return
	}
	s.objectsSaved = time.Now()
	if err := saveObjects(s.state, s.source.good); err != nil {
		s.failed(stepSaveObjects, err)
		return
	}
	s.objectsUnsaved = false
	s.recovered(stepSaveObjects)
}

// report logs what is new: a document that stays broken is logged once, and
// again if it breaks again.
func (s *Server) report(r reading, a allocation) {
	s.mu.Lock()
	s.errs = slices.Clone(r.errs)
	s.mu.Unlock()
	s.metrics.broken.Set(float64(len(r.errs)))
	now := map[string]bool{}
	say := func(line string, log func()) {
		if now[line] = true; !s.seen[line] {
			log()
		}
	}
	for _, e := range r.errs {
		say("document "+e.Error(), func() {
			s.cfg.Logger.Error("broken document", "error", e, "kept_last_good", e.Kept)
		})
	}
	for _, note := range r.notes {
		say("note "+note, func() { s.cfg.Logger.Info("an object makes no host", "what", note) })
	}
	for _, host := range a.without {
		say("no vip "+host, func() { s.cfg.Logger.Error("no automatic VIP is left", "host", host) })
	}
	for _, host := range a.moved {
		s.cfg.Logger.Warn("another object claims the automatic VIP, the host gets a new one", "host", host)
	}
	for _, step := range []string{stepRead, stepWatch, stepSave, stepSaveObjects, stepBuild} {
		if s.seen[step] {
			now[step] = true
		}
	}
	s.seen = now
}
