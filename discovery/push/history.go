package push

import (
	"slices"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// maxHistory bounds the changed hosts that a history holds. A client that is further behind is sent
// the buckets that differ, or its whole table.
const maxHistory = 1 << 11

// maxMerged bounds the generations of which since remembers the result. Most clients have one of a few.
const maxMerged = 64

// A generation is the number of changes of a view so far.
type generation uint64

// history holds the last changes of a view.
type history struct {
	now   generation
	steps []step // those up to now, one generation each
	size  int    // changed hosts in them
	// merged has what since has returned for a generation that was several steps before now.
	merged map[generation]step
}

// A step leads from one generation to the next.
type step struct {
	sum     digest.Sum // of the table before
	changes []hosts.HostChange
	undo    []undo // one for each change
}

// An undo is the digest of a bucket before a change.
type undo struct {
	bucket uint8
	digest uint64
}

// add begins a new generation.
func (h *history) add(s step) {
	h.now++
	clear(h.merged)
	h.steps = append(h.steps, s)
	for h.size += len(s.changes); h.size > maxHistory; h.steps = h.steps[1:] {
		h.size -= len(h.steps[0].changes)
		h.steps[0] = step{}
	}
}

// find returns the generation whose table is most like that of a client, and the buckets that differ from
// it. The digests of both are those of now and of the client. Replicas put the same changes to use in
// different steps, so a client of another replica may be between two generations.
func (h *history) find(now, client *digest.Digests) (g generation, differing digest.Set) {
	differ := 0 // buckets
	for i := range now {
		if now[i] != client[i] {
			differ++
		}
	}
	then, fewest := *now, differ
	best := then
	g = h.now
	for i := len(h.steps) - 1; i >= 0 && fewest > 0; i-- {
		for _, u := range slices.Backward(h.steps[i].undo) {
			if then[u.bucket] == client[u.bucket] {
				differ++
			}
			if then[u.bucket] = u.digest; then[u.bucket] == client[u.bucket] {
				differ--
			}
		}
		if differ < fewest {
			g, fewest, best = h.now-generation(len(h.steps)-i), differ, then
		}
	}
	return g, best.Differing(client)
}

// since returns what leads from a generation to now, as one step, without hosts that were neither there
// before nor are now; ok is false if that is not known any more.
func (h *history) since(g generation) (all step, ok bool) {
	behind := h.now - g
	if behind > generation(len(h.steps)) {
		return step{}, false
	}
	steps := h.steps[generation(len(h.steps))-behind:]
	switch len(steps) {
	case 0:
		return step{}, true
	case 1:
		return steps[0], true
	}
	if all, ok = h.merged[g]; ok {
		return all, true
	}
	all.sum = steps[0].sum
	at := map[string]int{}
	for _, s := range steps {
		for _, c := range s.changes {
			if i, again := at[c.Key()]; again {
				all.changes[i].New = c.New
				continue
			}
			at[c.Key()] = len(all.changes)
			all.changes = append(all.changes, c)
		}
	}
	all.changes = slices.DeleteFunc(all.changes, func(c hosts.HostChange) bool { return c.Old == nil && c.New == nil })
	if h.merged == nil || len(h.merged) == maxMerged {
		h.merged = map[generation]step{}
	}
	h.merged[g] = all
	return all, true
}
