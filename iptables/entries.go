package iptables

import (
	"log/slog"
	"time"

	"github.com/nametap/nametap/internal/conntrack"
)

// entries drops conntrack entries that keep sockets on the path of previous rules.
type entries struct {
	log       *slog.Logger
	leftovers map[string]time.Time // entries, by their keys, that are dropped later; when they were first seen
	replies   time.Time            // until then replies to queries of dropped entries may arrive; zero if none may
	closing   time.Time            // until then connections from before the last change may be reset
	logged    map[Family]string    // the last failure that was logged
	failed    bool                 // the last sweep failed
}

func newEntries(log *slog.Logger) entries { return entries{log: log, logged: make(map[Family]string)} }

// pending reports whether a sweep is due although the rules have not changed since the last one.
func (e *entries) pending() bool {
	return e.failed || len(e.leftovers) > 0 || !e.replies.IsZero() || time.Now().Before(e.closing)
}

// sweep drops entries that let queries bypass the agent, after a change of rules. Leftovers are dropped
// when they have been there for the settle time. After a failure the next check tries again. For
// [closingTime] after a change every check sweeps.
func (e *entries) sweep(cfg Config, in installed, changed bool) {
	now := time.Now()
	changed = changed || e.failed
	late := e.late(now, changed)
	previous := e.leftovers
	e.leftovers, e.failed = make(map[string]time.Time), false
	for f, v := range in.families {
		if !changed && !late && len(previous) == 0 {
			continue
		}
		s := sweep{ports: []uint16{cfg.Port}, zone: v.zone}
		dropped, ok := e.drop(f, s.bypassing(changed, func(leftover conntrack.Entry) bool {
			return e.settled(leftover.Key(), previous, now.Add(-cfg.Settle))
		}))
		e.failed = e.failed || !ok
		if changed && dropped > 0 {
			e.replies = now.Add(cfg.Settle)
		}
		if changed && cfg.hasVIPs(f) {
			_, ok := e.drop(f, bypassingVIPs(cfg))
			e.failed = e.failed || !ok
		}
	}
}

// closingTime is how long after a change connections from before may still be reset. Clients wait
// for a reply for at most so long.
const closingTime = 30 * time.Second

// late reports whether a sweep is due because a change was not long ago, and notes a change.
func (e *entries) late(now time.Time, changed bool) bool {
	if changed {
		e.closing = now.Add(closingTime)
	}
	late := !e.replies.IsZero() || now.Before(e.closing)
	if now.After(e.replies) {
		e.replies = time.Time{}
	}
	return late
}

// settled reports whether a leftover was first seen at a time or before. Otherwise it records
// the leftover.
func (e *entries) settled(key string, previous map[string]time.Time, by time.Time) bool {
	seen, ok := previous[key]
	if !ok {
		seen = time.Now()
	}
	if !seen.After(by) {
		return true
	}
	e.leftovers[key] = seen
	return false
}

// drop drops the entries of a family in a class, and returns how many. It logs a failure once.
func (e *entries) drop(f Family, c class) (dropped int, ok bool) {
	dropped, err := c.drop(f)
	switch {
	case err == nil:
		delete(e.logged, f)
	case e.logged[f] != err.Error():
		e.logged[f] = err.Error()
		e.log.Warn("dropping conntrack entries failed: open sockets may keep their previous path until they are closed",
			"family", f, "error", err)
	}
	if dropped > 0 {
		e.log.Debug("dropped conntrack entries", "family", f, "entries", dropped)
	}
	return dropped, err == nil
}
