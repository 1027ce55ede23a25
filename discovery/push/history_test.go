package push

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// D37: a client of a replica that has put the same changes to use in other steps is sent the changes since the
// step before, and the few buckets of what that replica had put to use of the next one.
func TestResumeBetweenSteps(t *testing.T) {
	const all = 3000
	old := make([]hosts.Change, 2) // of two replicas
	for i := range all {
		o := service("shop", fmt.Sprint("s", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250+1))
		for r := range old {
			old[r].Updated = append(old[r].Updated, o)
		}
	}
	mine, theirs := newService(), newService()
	mine.updateAll(t, old[0])
	theirs.updateAll(t, old[1])
	client := join(t, theirs, "shop", mergeHosts)
	client.ack()
	kept := join(t, mine, "shop", mergeHosts) // keeps the view
	kept.ack()
	step := func(s *Service, from, to int) {
		var c hosts.Change
		for i := from; i < to; i++ {
			c.Updated = append(c.Updated, service("shop", fmt.Sprint("s", i), fmt.Sprintf("10.1.%d.%d", i/250, i%250+1)))
		}
		s.updateAll(t, c)
	}
	for i := 0; i < 300; i += 10 {
		step(mine, i, i+10)
	}
	step(theirs, 0, 103) // between two steps of mine
	client.ack()

	// It makes no difference whether this replica has a client with the same view.
	again := newView(mine.tables.hosts, kept.view.key, mine.tables.past.steps)
	if len(again.history.steps) != 30 || !reflect.DeepEqual(again.history.steps, kept.view.history.steps) {
		t.Errorf("%d steps are recalled, want the %d of the view", len(again.history.steps), len(kept.view.history.steps))
	}

	buckets := client.view.buckets
	digests := buckets.Digests()
	p := kept.view.startLocked(&digests)
	if p.at != kept.view.history.now-20 && p.at != kept.view.history.now-19 {
		t.Errorf("the client resumes at generation %d of %d", p.at, kept.view.history.now)
	}
	missing := 0
	for i := range digest.Count {
		if p.missing != nil && p.missing.Has(i) {
			missing++
		}
	}
	if missing == 0 || missing > 7 {
		t.Errorf("the client is sent %d buckets, want at most 7", missing)
	}
	digests = kept.view.buckets.Digests()
	if p := kept.view.startLocked(&digests); p.at != kept.view.history.now || p.missing != nil {
		t.Errorf("a client that has everything starts at %+v", p)
	}
	digests[7]++
	if p := kept.view.startLocked(&digests); p.at != kept.view.history.now || p.missing == nil || !p.missing.Has(7) {
		t.Errorf("a client with one other bucket starts at %+v", p)
	}
}

// BenchmarkResume measures where in a full history a client resumes that has another table.
func BenchmarkResume(b *testing.B) {
	s := newService()
	c := join(b, s, "shop", mergeHosts)
	for i := range maxHistory {
		s.updateAll(b, hosts.Change{Updated: []object.Object{service("shop", fmt.Sprint("s", i), "10.0.0.1")}})
	}
	var client digest.Digests
	client[3] = 1
	for b.Loop() {
		c.view.startLocked(&client)
	}
}
