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
	leftovers := make(map[string]time.Time)
	now := time.Now()
	changed = changed || e.failed
	e.failed = false
	for f, v := range in.families {
		if !changed && (v.zone == 0 || !maybe && len(e.leftovers) == 0) {
			continue
		}
		s := sweep{ports: []uint16{cfg.Port}, zone: v.zone}
		dropped := e.drop(f, func(entry conntrack.Entry) bool {
			if s.stale(entry) {
				return true
			}
			if !s.leftover(entry) {
				return false
			}
			seen, ok := e.leftovers[entry.Key()]
			if !ok {
				seen = now
			}
			if now.Sub(seen) >= cfg.Settle {
				return true
			}
			leftovers[entry.Key()] = seen
			return false
		})
		e.failed = e.failed || !dropped
	}
	e.leftovers = leftovers
}

// drop drops the entries of a family that match, and logs a failure once. It reports
// whether it did.
func (e *entries) drop(f Family, match func(conntrack.Entry) bool) bool {
	n, err := dropEntries(f, match)
	switch {
	case err == nil:
		delete(e.logged, f)
	case e.logged[f] != err.Error():
		e.logged[f] = err.Error()
		e.log.Warn("sockets that were used before may keep their old path until they are closed",
			"family", f, "error", err)
	}
	if n > 0 {
		e.log.Debug("dropped conntrack entries", "family", f, "entries", n)
	}
	return err == nil
}
