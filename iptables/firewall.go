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
	lacks  map[family.Family]lack // the repairs that wait
	spared map[family.Family]bool // the families whose table filter the current step leaves as it is
}

// A lack describes a table filter whose repair waits.
type lack struct {
	start time.Time
	empty bool // the table has no rule of another program
}

// look decides for which families the current step leaves table filter as it is. changed is when the kernel last
// announced a change of nft rules. If the kernel has announced none, changed is zero, and the step repairs every
// table filter. Otherwise it repairs only a table filter whose repair has waited long enough. A table filter that
// was complete at the last step is left as it is, because a firewall may have begun to change it.
func (w *filterRepair) look(changed time.Time) {
	w.spared = make(map[family.Family]bool)
	for _, f := range family.All() {
		l, waits := w.lacks[f]
		pause := firewallPause
		if l.empty {
			pause = firewallLimit
		}
		w.spared[f] = !changed.IsZero() && (!waits || time.Since(changed) < pause && time.Since(l.start) < firewallLimit)
	}
}

// spare returns the table of a family that the current step leaves as it is, or "" if there is none.
func (w *filterRepair) spare(f family.Family) string {
	if w.spared[f] {
		return filterTable
	}
	return ""
}

// due reports whether the current step is to make a repair that has waited.
func (w *filterRepair) due() bool {
	for f := range w.lacks {
		if !w.spared[f] {
			return true
		}
	}
	return false
}

// record records the repairs that the current step leaves to a later step. s has the rules in the kernel.
func (w *filterRepair) record(s *side, inst installation) {
	previous := w.lacks
	w.lacks = make(map[family.Family]lack)
	for f, inKernel := range s.saved {
		filter := inKernel[filterTable]
		if !w.spared[f] || len(inst.families[f].rules.table(f, filterTable).drift(filter)) == 0 {
			continue
		}
		l, ok := previous[f]
		if !ok {
			l.start = time.Now()
		}
		l.empty = filter.foreignRules() == 0
		w.lacks[f] = l
	}
}
