package upstream

import (
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// F4: when a server is late, by the times of its replies so far (rule 1).
func TestLate(t *testing.T) {
	t.Parallel()
	h, now := history{}, time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for i, step := range []struct {
		pause, rtt time.Duration
		code       int
		want       time.Duration // until a server is late
	}{
		{0, 80 * ms, 0, 240 * ms},                            // SRTT 80 ms, RTTVAR 40 ms
		{time.Second, 80 * ms, 0, 237500 * time.Microsecond}, // RTTVAR shrinks by 1/64
		{time.Second, 160 * ms, 0, 304791666},                // and grows by 1/4, SRTT by 1/3
		{time.Second, 3 * time.Second, 2, 304791666},         // a failure that took long does not count
		{20 * time.Second, 20 * ms, 0, 298593749},            // SRTT shrinks by 1/2 after a pause
		{time.Second, 3 * time.Second, 0, 400 * ms},          // at most
		{time.Second, 60 * time.Second, dns.RcodeNameError, 400 * ms},
	} {
		now = now.Add(step.pause)
		h.replied(now, step.rtt, reading{code: step.code})
		if got := h.lateAfter(); got != step.want {
			t.Errorf("reply %d: late after %v, want %v", i, got, step.want)
		}
	}
	if h.srtt > time.Second {
		t.Errorf("SRTT is %v: a sample is a second at most", h.srtt)
	}
	fast := history{}
	if got := fast.lateAfter(); got != 200*ms {
		t.Errorf("before the first reply: %v", got)
	}
	if fast.replied(now, ms, reading{}); fast.lateAfter() != 50*ms {
		t.Errorf("a fast server is late after %v", fast.lateAfter())
	}
}

// F4: when a server that owes a reply is probed and down (rule 2).
func TestSilence(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	var h history
	h.sent(start)
	var probes []time.Duration
	down := time.Duration(0)
	for at := time.Duration(0); at < 5*time.Second; at += 10 * ms {
		now := start.Add(at)
		st := h.standing(now)
		if st.state == Down && down == 0 {
			down = at
		}
		if h.probeDue(now, false) {
			probes = append(probes, at)
		}
	}
	want := []time.Duration{200 * ms, 450 * ms, 700 * ms, 1700 * ms, 2700 * ms, 3700 * ms, 4700 * ms}
	if !slices.Equal(probes, want) || down != 1200*ms {
		t.Errorf("probed after %v, down after %v", probes, down)
	}
	if h.replied(start.Add(5*time.Second), ms, reading{}); h.standing(start.Add(time.Hour)).state != Up || h.owes() {
		t.Error("it is not up after a reply")
	}
	for range 3 {
		h.refused(start.Add(time.Minute))
	}
	if st := h.standing(start.Add(time.Minute + 999*ms)); st.state != Up {
		t.Errorf("%v before a second has passed", st.state)
	}
	if st := h.standing(start.Add(time.Minute + time.Second)); st.state != Down {
		t.Errorf("%v after three refused connections", st.state)
	}
}

// F3: when a server is said to answer all queries with failures.
func TestRefusals(t *testing.T) {
	t.Parallel()
	question := func(domain string) []byte {
		return wire.AppendQuestion(nil, wire.Name("\x03www"+domain), dns.TypeA, dns.ClassINET)
	}
	for name, tc := range map[string]struct {
		domains  []string
		failures int
		want     bool
	}{
		"ten failures, three domains": {[]string{"\x01a\x07example", "\x01b\x07example", "\x01c\x07example"}, 10, true},
		"nine failures":               {[]string{"\x01a\x07example", "\x01b\x07example", "\x01c\x07example"}, 9, false},
		"two domains":                 {[]string{"\x01a\x07example", "\x01b\x07example"}, 20, false},
		"three names of a domain":     {[]string{"\x01a\x01z\x07example", "\x01b\x01Z\x07example", "\x01c\x01z\x07example"}, 20, false},
	} {
		var f refusals
		for i := range tc.failures {
			f.add(question(tc.domains[i%len(tc.domains)]))
		}
		if f.all() != tc.want {
			t.Errorf("%s: %v", name, f.all())
		}
	}
}
