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
	namespaces       map[string]taken
	shown            int            // what all namespaces show to other namespaces
	hidden           listed[Hidden] // the namespaces beyond a bound, each once
}

// taken is what a namespace takes in tables, in bytes: what it shows to other namespaces, or would show if it were not
// hidden, and what only the namespace itself sees.
type taken struct{ shown, own int }

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
	changed := map[string]bool{}
	for _, c := range changes {
		u.count(c.Old, -1, changed)
		u.count(c.New, 1, changed)
	}
	beyond := u.beyond()
	maps.Copy(changed, beyond)
	for namespace := range u.hidden.byKey {
		changed[namespace] = true
	}
	passed = map[string]bool{}
	for namespace := range changed {
		t := u.namespaces[namespace]
		now := Hidden{Namespace: namespace, Size: t.own, Shown: beyond[namespace]}
		if now.Shown {
			now.Size += t.shown
		}
		now.Own = now.Size > u.maxOwn
		if before := u.hides(namespace); now.Shown != before.Shown || now.Own != before.Own {
			if u.hidden.set(namespace); now.Shown || now.Own {
				u.hidden.set(namespace, now)
			}
			passed[namespace] = true
		}
		if t == (taken{}) {
			delete(u.namespaces, namespace)
		}
	}
	return passed
}

// count adds the claims to a host, or removes them if sign is -1, and adds their namespaces to changed. h may be nil.
func (u *usage) count(h *Host, sign int, changed map[string]bool) {
	if h == nil {
		return
	}
	claims := map[string]int{}
	for _, c := range h.claims {
		claims[c.namespace]++
	}
	for _, c := range h.claims {
		t := u.namespaces[c.namespace]
		if size := sign * h.size(c, claims[c.namespace] > 1); h.shows(c) {
			t.shown, u.shown = t.shown+size, u.shown+size
		} else {
			t.own += size
		}
		u.namespaces[c.namespace], changed[c.namespace] = t, true
	}
}

// beyond returns the namespaces whose hosts are hidden from other namespaces: those that show most, and the later one by
// name of two that show as much, until the others show at most maxShown. So one namespace can cause only one other to be
// hidden, which shows more than itself.
func (u *usage) beyond() map[string]bool {
	hidden, rest := map[string]bool{}, u.shown
	if rest <= u.maxShown {
		return hidden // otherwise each change would cost as much as all namespaces
	}
	for _, namespace := range slices.SortedFunc(maps.Keys(u.namespaces), func(a, b string) int {
		return cmp.Or(cmp.Compare(u.namespaces[b].shown, u.namespaces[a].shown), cmp.Compare(b, a))
	}) {
		if rest > u.maxShown {
			hidden[namespace] = true
			rest -= u.namespaces[namespace].shown
		}
	}
	return hidden
}

// hides returns what is hidden of a namespace.
func (u *usage) hides(namespace string) Hidden {
	return append(u.hidden.byKey[namespace], Hidden{})[0]
}

// shows reports whether a claim shows the host to other namespaces, or would if it were not hidden.
func (h *Host) shows(c *claim) bool {
	return !c.private && (c.exportTo.IsDefault() && h.shared || c.exportTo.Public ||
		slices.ContainsFunc(c.exportTo.Namespaces, func(n string) bool { return n != c.namespace }))
}

// limited returns a claim to a host as it counts: only its namespace sees it, or nobody, if it is hidden.
func (u *usage) limited(h *Host, c *claim) *claim {
	hides := u.hides(c.namespace)
	if !hides.Shown && !hides.Own {
		return c
	}
	one := *c
	one.hidden, one.dropped = hides.Shown, hides.Own && (hides.Shown || !h.shows(c))
	return &one
}
