package discovery

import (
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/logonce"
)

// tellEvery bounds how often the log gets another reason why the server is not ready.
const tellEvery = 5 * time.Second

// maxLines is how many lines about objects are logged at once, and then one a second: the owner of a namespace can cause
// any number of lines.
const maxLines = 100

// A report has the state of the sources and of the served tables, for operators. It logs what is new.
type report struct {
	logger  *slog.Logger
	metrics *metrics

	mu            sync.Mutex
	logged        map[string]bool // errors that were logged and have not ended
	unread        logonce.Failure // why the configuration directory could not be read
	last          noted           // what log has looked at last
	errs          []object.Error
	waiting       string         // why the server is not ready; "" once it is
	loggedWaiting string         // the last value of waiting that was logged
	telling       rate.Sometimes // limits the lines about waiting, because an error in it may have another port every second
	lines         *rate.Limiter  // limits lines about objects
	beyond        rate.Sometimes // limits how often the log says that there were too many lines
}

func newReport(logger *slog.Logger, m *metrics) *report {
	return &report{
		logger: logger, metrics: m, logged: map[string]bool{}, waiting: "no object has been read yet",
		telling: rate.Sometimes{First: 1, Interval: tellEvery}, lines: rate.NewLimiter(1, maxLines), beyond: rate.Sometimes{Interval: time.Minute},
	}
}

// directoryRead notes the result of a look at the configuration directory.
func (r *report) directoryRead(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.metrics.lastRead.SetToCurrentTime()
	} else {
		r.metrics.failures.Inc()
	}
	if r.unread.Differs(err) {
		r.logger.Error("cannot read the configuration directory (--config-dir); the current tables stay", "error", err)
	}
}

// setWaiting records why the server is not ready, and logs the reason if it has changed.
func (r *report) setWaiting(reason string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.waiting = reason; reason == "" || reason == r.loggedWaiting {
		return
	}
	r.telling.Do(func() {
		r.loggedWaiting = reason
		r.logger.Warn("not ready, no stream is served", "because", reason)
	})
}

// waitingFor returns why the server is not ready, or "" if it is.
func (r *report) waitingFor() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.waiting
}

// setErrors sets the errors of a reading.
func (r *report) setErrors(errs []object.Error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errs = errs
}

// Errors returns the errors in objects, and in the directories and API servers from which they are read, what is wrong with
// hosts, and an error for each hidden namespace. Errors in the configuration directory are sorted by file and document.
func (r *report) Errors() []object.Error {
	r.mu.Lock()
	defer r.mu.Unlock()
	errs := slices.Concat(r.errs, r.last.problems)
	for _, h := range r.last.hidden {
		errs = append(errs, object.Error{File: "namespace " + h.Namespace, Msg: hiddenMessage(h)})
	}
	return errs
}

// Hidden returns why hosts of a namespace are hidden, and of all namespaces if it is "".
func (r *report) Hidden(namespace string) (why []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.last.hidden {
		if namespace == "" || namespace == h.Namespace {
			why = append(why, "namespace "+h.Namespace+": "+hiddenMessage(h))
		}
	}
	return why
}

// hiddenMessage says why hosts of a namespace are hidden.
func hiddenMessage(h hosts.Hidden) string {
	why := fmt.Sprintf("all namespaces show more than %d KiB to other namespaces, and this one is among those that show most", hosts.MaxShown>>10)
	if h.Own {
		why = fmt.Sprintf("what only the namespace sees, also because it is hidden from others, has more than %d KiB, and is in no table", hosts.MaxOwn>>10)
	}
	return fmt.Sprintf("hosts of the namespace have %d KiB in tables, and are hidden until they have less: %s; "+
		"use fewer hosts or addresses, or show them to fewer namespaces (exportTo)", h.Size>>10, why)
}

// noted has lists that may be long, and seldom change.
type noted struct {
	errs, problems []object.Error
	notes          []string
	hidden         []hosts.Hidden
}

// log logs what is new in a reading, and in the update that follows from it. A document that stays broken is logged
// once. If it was repaired and breaks again, it is logged again.
func (r *report) log(all source.Reading, u hosts.Update) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.metrics.broken.Set(float64(len(all.Errors) + len(u.Problems)))
	r.metrics.hidden.Set(float64(len(u.Hidden)))
	before := r.last
	r.last = noted{all.Errors, u.Problems, all.Notes, u.Hidden}
	unchanged := same(before.errs, all.Errors) && same(before.problems, u.Problems) && same(before.notes, all.Notes) &&
		same(before.hidden, u.Hidden)
	if unchanged {
		return // otherwise each change of an object would cost as much as all errors
	}
	logged := map[string]bool{}
	logNew := func(id string, log func()) {
		switch logged[id] = true; {
		case r.logged[id]:
		case r.lines.Allow():
			log()
		default:
			r.beyond.Do(func() { r.logger.Warn("there are too many lines about objects to log them all: see /debug/errors") })
		}
	}
	// The namespace must not be able to hide this line behind others.
	for _, h := range u.Hidden {
		logNew("hidden "+h.Namespace+" "+hiddenMessage(h), func() { r.logger.Error(hiddenMessage(h), "namespace", h.Namespace) })
	}
	for _, e := range all.Errors {
		logNew("document "+e.Error(), func() { r.logger.Error("broken document", "error", e, "kept_last_good", e.Kept) })
	}
	for _, note := range all.Notes {
		logNew("note "+note, func() { r.logger.Info("an object makes no host", "what", note) })
	}
	for _, e := range u.Problems {
		logNew("problem "+e.Error(), func() { r.logger.Warn("a host is left out", "error", e) })
	}
	r.logged = logged
}
