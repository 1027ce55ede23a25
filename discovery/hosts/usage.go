package hosts

import (
	"cmp"
	"maps"
	"slices"
)

// MaxShown bounds the size in tables of the hosts that all namespaces show to other namespaces, in bytes, and MaxOwn the
// size of those that only one namespace sees. A table has at most both, so agents accept it in a container with the default
// memory (docs/injection.md). 100,000 Services have about 9 MiB.
const (
	MaxShown = 12 << 20
	MaxOwn   = 4 << 20
)

// usage has the size of the hosts of each namespace, and what is hidden because of it. It depends on the current objects
// only, so replicas agree. A host counts for the namespaces of its claims, each with its own claims.
type usage struct {
	maxShown, maxOwn int
	namespaces       map[string]*taken
	ordered          []*taken       // the namespaces; in order if limited is true
	shown            int            // what all namespaces show to other namespaces
	limited          bool           // shown was more than maxShown after the last changes
	hidden           listed[Hidden] // the namespaces beyond a bound, each once
}

// taken is what a namespace takes in tables, in bytes: what it shows to other namespaces, or would show if it were not
// hidden, and what only the namespace itself sees.
type taken struct {
	shown, own int
	beyond     bool // the hosts must be hidden from other namespaces
	hides      Hidden
}

// Hidden is a namespace whose hosts are hidden, because they are too large.
type Hidden struct {
	Namespace string
	Size      int  // of the hosts that other namespaces do not see, in bytes, when they were hidden
	Shown     bool // hosts are hidden from other namespaces
	Own       bool // hosts that other namespaces do not see, perhaps because of Shown, are in no table
}

// follow counts changed hosts. It returns the namespaces of which something else is hidden now: their hosts must be made
// again.
func (u *usage) follow(changes []HostChange) (passed map[string]bool) {
	changed := map[*taken]bool{}
	for _, c := range changes {
		u.count(c.Old, -1, changed)
		u.count(c.New, 1, changed)
	}
	all := slices.Collect(maps.Keys(changed))
	if u.limited || u.shown > u.maxShown { // otherwise a change costs nothing for other namespaces
		u.order()
		all = u.ordered
	}
	passed, empty := map[string]bool{}, false
	for _, t := range all {
		now := Hidden{Namespace: t.hides.Namespace, Size: t.own, Shown: t.beyond}
		if t.beyond {
			now.Size += t.shown
		}
		if now.Own = now.Size > u.maxOwn; now.Shown != t.hides.Shown || now.Own != t.hides.Own {
			if u.hidden.set(now.Namespace); now.Shown || now.Own {
				u.hidden.set(now.Namespace, now)
			}
			t.hides, passed[now.Namespace] = now, true
		}
		if t.shown+t.own == 0 {
			delete(u.namespaces, now.Namespace)
			empty = true
		}
	}
	if empty {
		u.ordered = slices.DeleteFunc(u.ordered, func(t *taken) bool { return t.shown+t.own == 0 })
	}
	return passed
}

// count adds the claims to a host, or removes them if sign is -1, and adds their namespaces to changed. h may be nil.
func (u *usage) count(h *Host, sign int, changed map[*taken]bool) {
	if h == nil {
		return
	}
	claims := map[string]int{}
	for _, c := range h.claims {
		claims[c.namespace]++
	}
	for _, c := range h.claims {
		t := u.namespaces[c.namespace]
		if t == nil {
			t = &taken{hides: Hidden{Namespace: c.namespace}}
			u.namespaces[c.namespace], u.ordered = t, append(u.ordered, t)
		}
		if size := sign * h.size(c, claims[c.namespace] > 1); h.shows(c) {
			t.shown, u.shown = t.shown+size, u.shown+size
		} else {
			t.own += size
		}
		changed[t] = true
	}
}

// order finds the namespaces whose hosts must be hidden from other namespaces: those that show most, and the later one by
// name of two that show as much, until the others show at most maxShown. So one namespace can cause only one other to be
// hidden, which shows more than itself.
func (u *usage) order() {
	slices.SortFunc(u.ordered, func(a, b *taken) int {
		return cmp.Or(cmp.Compare(b.shown, a.shown), cmp.Compare(b.hides.Namespace, a.hides.Namespace))
	})
	rest := u.shown
	for _, t := range u.ordered {
		if t.beyond = rest > u.maxShown; t.beyond {
			rest -= t.shown
		}
	}
	u.limited = u.shown > u.maxShown
}

// shows reports whether a claim shows the host to other namespaces, or would if it were not hidden.
func (h *Host) shows(c *claim) bool {
	return !c.private && (c.exportTo.IsDefault() && h.shared || c.exportTo.Public ||
		slices.ContainsFunc(c.exportTo.Namespaces, func(n string) bool { return n != c.namespace }))
}

// limit returns a claim to a host as it counts: only its namespace sees it, or nobody, if it is hidden.
func (u *usage) limit(h *Host, c *claim) *claim {
	t := u.namespaces[c.namespace]
	if t == nil || !t.hides.Shown && !t.hides.Own {
		return c
	}
	one := *c
	one.hidden, one.dropped = t.hides.Shown, t.hides.Own && (t.hides.Shown || !h.shows(c))
	return &one
}
