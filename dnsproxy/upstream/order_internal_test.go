package upstream

import (
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"
)

// F3, F4: which server's reply is the answer, when, and whether it is provisional.
func TestOrder(t *testing.T) {
	t.Parallel()
	dead := deadWhile(steady(0), func(time.Duration) bool { return true })
	after := func(delay time.Duration, code int) behaviour { return says(steady(delay), code) }
	found := func(delay time.Duration) behaviour { return after(delay, dns.RcodeSuccess) }
	none := func(delay time.Duration) behaviour { return after(delay, dns.RcodeNameError) }
	fails := after(ms, dns.RcodeServerFailure)
	for name, tc := range map[string]struct {
		options Options
		servers []behaviour
		want    string // the answer of which server, or its failure
		least   time.Duration
		most    time.Duration
	}{
		"the first":                      {Options{}, []behaviour{found(ms), found(ms)}, "0 NOERROR", ms, ms},
		"the first has no answer":        {Options{}, []behaviour{none(ms), found(ms)}, "0 NXDOMAIN", ms, ms},
		"the first fails":                {Options{}, []behaviour{fails, found(ms)}, "1 NOERROR provisional", 2 * ms, 2 * ms},
		"the first fails, no answer":     {Options{}, []behaviour{fails, none(ms)}, "1 NXDOMAIN provisional", 2 * ms, 2 * ms},
		"the first disclaims":            {Options{}, []behaviour{after(ms, dns.RcodeRefused), found(ms)}, "1 NOERROR", 2 * ms, 2 * ms},
		"the first knows no such query":  {Options{}, []behaviour{after(ms, dns.RcodeNotImplemented), none(ms)}, "1 NXDOMAIN", 2 * ms, 2 * ms},
		"one of two fails":               {Options{}, []behaviour{after(ms, dns.RcodeRefused), fails, found(ms)}, "2 NOERROR provisional", 3 * ms, 3 * ms},
		"the best failure":               {Options{}, []behaviour{after(ms, dns.RcodeRefused), fails, after(ms, dns.RcodeFormatError)}, "1 SERVFAIL", 3 * ms, 3 * ms},
		"the first is late":              {Options{}, []behaviour{found(300 * ms), found(ms)}, "1 NOERROR provisional", 201 * ms, 201 * ms},
		"no answer is held":              {Options{}, []behaviour{found(300 * ms), none(ms)}, "0 NOERROR", 300 * ms, 300 * ms},
		"until the first has none":       {Options{}, []behaviour{none(300 * ms), none(ms)}, "0 NXDOMAIN", 300 * ms, 300 * ms},
		"until the first fails":          {Options{}, []behaviour{after(300*ms, dns.RcodeServerFailure), none(ms)}, "1 NXDOMAIN provisional", 300 * ms, 300 * ms},
		"until the first is down":        {Options{}, []behaviour{dead, none(ms)}, "1 NXDOMAIN provisional", time.Second, 2 * time.Second},
		"of two, the earlier is held":    {Options{}, []behaviour{dead, none(300 * ms), none(ms)}, "1 NXDOMAIN provisional", time.Second, 2 * time.Second},
		"a dead one, and one that fails": {Options{}, []behaviour{dead, fails}, "1 SERVFAIL", time.Second, 2 * time.Second},
		"by time nothing is held":        {Options{Fastest: true}, []behaviour{found(300 * ms), none(ms)}, "1 NXDOMAIN", 201 * ms, 201 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := simulated(t, Config{})
				g, _ := group(c, tc.options, tc.servers...)
				began := time.Now()
				answer, err := g.Ask(t.Context(), simQuery, UDPOnly)
				took := time.Since(began)
				if err != nil {
					t.Fatal(err)
				}
				got := strings.TrimPrefix(answer.Server, "192.0.2.") + " " + dns.RcodeToString[rcode(answer.Reply)]
				if answer.Provisional {
					got += " provisional"
				}
				if got != tc.want || took < tc.least || took > tc.most {
					t.Errorf("%s after %v, want %s after %v to %v", got, took, tc.want, tc.least, tc.most)
				}
			})
		})
	}
}

// F4: to which servers a query is sent again while none replies, and when. The pauses between repetitions double. When all
// servers are down, all are asked at once.
func TestRepetitions(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		var sent []time.Duration
		began := time.Now()
		dead := func(*rand.Rand, time.Duration) (time.Duration, int, bool) { return 0, 0, true }
		g, all := group(c, Options{}, dead, dead)
		for _, v := range all {
			v.names = func(packet []byte) bool {
				if string(packet[12:]) == string(simQuery[12:]) {
					sent = append(sent, time.Since(began).Round(ms))
				}
				return false
			}
			v.does = steady(0)
		}
		_, _, _ = g.Exchange(t.Context(), simQuery, UDPOnly)
		if len(sent) < 6 || len(sent) > 12 || sent[0] != 0 || sent[1] != unknownLate || sent[2] != 2*unknownLate || sent[3] != 4*unknownLate {
			t.Errorf("sent after %v", sent)
		}
		sent, began = nil, time.Now()
		_, _, _ = g.Exchange(t.Context(), simQuery, UDPOnly)
		if len(sent) < 2 || sent[1] != 0 || !g.Down() {
			t.Errorf("sent after %v, down: %v", sent, g.Down())
		}
	})
}
