//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package upstream

import (
	"bytes"
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// F18: a server behind a middlebox that drops packets with an OPT record is asked without one,
// for ten minutes, and then with one again; even if another server does not know the name, and
// if the client wants signatures.
func TestEDNSIsDropped(t *testing.T) {
	for name, tc := range map[string]struct {
		servers int
		do      uint32
	}{"alone": {1, 0}, "with DO": {1, wire.OPTDO}, "beside another": {2, 0}} {
		synctest.Test(t, func(t *testing.T) {
			c := simulated(t, Config{})
			does := []behaviour{steady(time.Millisecond), says(steady(time.Millisecond), dns.RcodeNameError)}[:tc.servers]
			g, all := group(c, Options{}, does...)
			drops := true
			withEDNS := 0
			all[0].names = func(packet []byte) bool {
				edns := binary.BigEndian.Uint16(packet[10:]) > 0
				if edns && bytes.Contains(packet, []byte("\x07example")) {
					withEDNS++
				}
				return !edns || !drops
			}
			query := wire.AppendOPT(bytes.Clone(simQuery), 1232, tc.do)
			query[11] = 1
			ask := func() (took time.Duration, from string) {
				began := time.Now()
				_, from, err := g.Exchange(t.Context(), query, UDPOnly)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				return time.Since(began), from
			}
			if took, _ := ask(); took > 2500*time.Millisecond {
				t.Errorf("%s: the first answer took %v", name, took)
			}
			for range 300 { // it may take some queries until the agent knows
				ask()
				time.Sleep(10 * time.Millisecond)
			}
			withEDNS = 0
			for range 10 {
				if took, from := ask(); took > 2*time.Millisecond || from != g.servers[0].name {
					t.Errorf("%s: %v took %v", name, from, took)
				}
			}
			if withEDNS > 0 {
				t.Errorf("%s: asked %d times with EDNS", name, withEDNS)
			}
			drops = false
			time.Sleep(rememberQuirk)
			ask()
			if took, from := ask(); took > 2*time.Millisecond || from != g.servers[0].name || withEDNS != 2 {
				t.Errorf("%s, 10 minutes later: %v took %v, asked %d times with EDNS", name, from, took, withEDNS)
			}
		})
	}
}

// F18: a server that has sent an OPT record in the last ten minutes is asked with one, although a
// query without one was answered: its replies may have been lost.
func TestEDNSIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		g, all := group(c, Options{}, steady(time.Millisecond))
		loses := false
		all[0].names = func(packet []byte) bool { return !loses || binary.BigEndian.Uint16(packet[10:]) == 0 }
		query := wire.AppendOPT(bytes.Clone(simQuery), 1232, 0)
		query[11] = 1
		for _, loses = range []bool{false, true, false} {
			answer, err := g.Ask(t.Context(), query, UDPOnly)
			if err != nil || answer.Plain != loses {
				t.Errorf("%+v, %v", answer, err)
			}
			time.Sleep(time.Second)
		}
	})
}
