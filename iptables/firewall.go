package iptables

import (
	"time"

	"github.com/nametap/nametap/internal/family"
)

const (
	// Table filter is repaired when nft rules have not changed for the time firewallPause.
	firewallPause = 200 * time.Millisecond
	// firewallLimit replaces firewallPause while the table has no rule of another program. It is also the longest
	// time for which the repair waits.
	firewallLimit = 2 * time.Second
)

// A filterRepair decides when table filter is repaired, while another program may change rules. Firewalls replace
// their rules in several steps, and insert some of them by number. Firewalld with its backend iptables takes 0.1 s
// from the removal of the rules of table filter to `-I OUTPUT 4`, and 0.6 s on a busy machine. If a rule of nametap
// is installed in between, the firewall's rule gets another place among the firewall's own rules.
//
// So the repair of table filter waits for a pause in the changes of nft rules. The other tables are repaired at
// once, because queries are not captured without them.
//
// The repair can wait longer while table filter has no rules of other programs. Either such a table refuses no
// packet, so the rules of nametap are not needed. Or it refuses every packet, because a firewall has set its policies
// but not yet its rules.
type filterRepair struct {
	since  time.Time // when a repair that waits was first needed; zero if none waits
	empty  bool      // a table whose repair waits has no rule of another program
	spares bool      // the current step leaves table filter as it is
}

// look decides whether the current step leaves table filter as it is. changed is when the kernel last announced a change
// of nft rules. If the kernel has announced none, changed is zero, and the step repairs the table. Otherwise it repairs
// only a table whose repair has waited long enough. A table that was complete at the last step is left as it is,
// because a firewall may have begun to change it.
func (w *filterRepair) look(changed time.Time) {
	pause := firewallPause
	if w.empty {
		pause = firewallLimit
	}
	w.spares = !changed.IsZero() && (w.since.IsZero() || time.Since(changed) < pause && time.Since(w.since) < firewallLimit)
}

// start is like look, for a step that installs the rules of another goal, which the agent may want because queries pass
// through while a firewall changes rules. Without such a change, the step writes table filter, and so does the first one.
func (w *filterRepair) start(installed bool, changed time.Time) {
	if w.spares = false; installed && (!w.since.IsZero() || time.Since(changed) < firewallPause) {
		w.look(changed)
	}
}

// spare returns the table that the current step leaves as it is, or "" if there is none.
func (w *filterRepair) spare() string {
	if w.spares {
		return filterTable
	}
	return ""
}

// due reports whether the current step is to make a repair that has waited.
func (w *filterRepair) due() bool { return !w.since.IsZero() && !w.spares }

// record records whether the current step leaves a repair to a later step. s has the rules in the kernel.
func (w *filterRepair) record(s *side, inst installation) {
	since := w.since
	w.since, w.empty = time.Time{}, false
	for _, f := range family.All() {
		filter, rules := s.saved[f][filterTable], inst.families[f].rules
		if w.spares && s.saved[f] != nil && rules.spare == "" && len(rules.table(f, filterTable).drift(filter)) > 0 {
			if w.since = since; since.IsZero() {
				w.since = time.Now()
			}
			w.empty = w.empty || filter.foreignRules() == 0
		}
	}
}
