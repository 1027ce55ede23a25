package reply

import (
	"fmt"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// TestWholeSetsOnce checks that each record that is left out is compared once with those that
// fit, even if a server makes each of them the reason to leave out one more.
func TestWholeSetsOnce(t *testing.T) { // A9
	const kept, n = 80, 160
	msg := new(dns.Msg).SetQuestion("www.example.", dns.TypeA)
	msg.Compress = true
	add := func(first, count int) {
		for i := range count {
			rr, err := dns.NewRR(fmt.Sprintf("host-%d.example. 5 A 192.0.2.1", first+i))
			if err != nil {
				t.Fatal(err)
			}
			msg.Extra = append(msg.Extra, rr)
		}
	}
	add(0, kept)
	add(kept/2, kept/2) // of the sets of the last records that fit, the very last one first
	add(kept, kept/2)   // of sets of their own
	packed, err := msg.Pack()
	if err != nil {
		t.Fatal(err)
	}
	end, err := wire.WalkQuestions(packed)
	if err != nil {
		t.Fatal(err)
	}
	var places []place
	for w := wire.Walk(packed, end); w.Next(); {
		places = append(places, place{owner: w.Owner, fixed: w.Fixed})
	}
	visited := 0
	at := func(i int) place {
		visited++
		return places[i]
	}
	if got := wholeSets(packed, at, kept, n); got != kept/2 {
		t.Errorf("%d records stay, want %d", got, kept/2)
	}
	if limit := 2 * kept * n; visited > limit {
		t.Errorf("%d records compared, want at most %d", visited, limit)
	}
}
