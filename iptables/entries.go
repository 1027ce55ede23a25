package iptables

import (
	"log/slog"
	"time"

	"github.com/nametap/nametap/conntrack"
)

// entries drops conntrack entries that keep sockets on the path of previous rules.
type entries struct {
	log       *slog.Logger
	leftovers map[string]time.Time // entries, by their keys, that are dropped later; when they were first seen
	replies   time.Time            // until then replies to queries of dropped entries may arrive; zero if none may
	logged    map[Family]string    // the last failure that was logged
	swept     fingerprint          // of the kernel at the last sweep
	failed    bool                 // the last sweep failed
}

func newEntries(log *slog.Logger) entries { return entries{log: log, logged: make(map[Family]string)} }

// sweep drops entries that let queries bypass the agent, if rules have changed or may have.
// Leftovers are dropped when they have been there for the settle time. Without a zone, entries
// of other programs look like stale ones, so the change must be certain. After a failure the
// next check tries again.
func (e *entries) sweep(cfg Config, in installed, changed, maybe bool) {
	now := time.Now()
	changed = changed || e.failed
	late := !e.replies.IsZero()
	if now.After(e.replies) {
		e.replies = time.Time{}
	}
	previous := e.leftovers
	e.leftovers, e.failed = make(map[string]time.Time), false
	for f, v := range in.families {
		if !changed && !late && (v.zone == 0 || !maybe && len(previous) == 0) {
			continue
		}
		s := sweep{ports: []uint16{cfg.Port}, zone: v.zone}
		dropped, ok := e.drop(f, func(entry conntrack.Entry) bool {
			stale := ofReply(entry) || (changed || v.zone != 0) && s.stale(entry)
			return stale || s.leftover(entry) && e.settled(entry.Key(), previous, now.Add(-cfg.Settle))
		})
		e.failed = e.failed || !ok
		if changed && dropped > 0 {
			e.replies = now.Add(cfg.Settle)
		}
	}
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

// drop drops the entries of a family that match, and returns how many. It logs a failure once.
func (e *entries) drop(f Family, match func(conntrack.Entry) bool) (dropped int, ok bool) {
	dropped, err := dropEntries(f, match)
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
