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

// F18: a server behind a middlebox that drops packets with an OPT record is asked without one in time, even if another
// server does not know the name; but not if the client wants signatures.
func TestEDNSIsDropped(t *testing.T) {
	for name, tc := range map[string]struct {
		servers int
		do      uint32
	}{"alone": {1, 0}, "with DO": {1, wire.OPTDO}, "beside another": {2, 0}} {
		synctest.Test(t, func(t *testing.T) {
			c := simulated(t, Config{})
			does := []behaviour{steady(time.Millisecond), says(steady(time.Millisecond), dns.RcodeNameError)}[:tc.servers]
			g, all := group(c, Options{}, does...)
			all[0].names = func(packet []byte) bool { return binary.BigEndian.Uint16(packet[10:]) == 0 }
			query := wire.AppendOPT(bytes.Clone(simQuery), 1232, tc.do)
			query[11] = 1
			for range 10 {
				began := time.Now()
				answer, err := g.Ask(t.Context(), query, UDPOnly)
				if took := time.Since(began); tc.do == 0 && (err != nil || !answer.Plain || answer.Server != g.servers[0].name || took > 2*time.Second) {
					t.Errorf("%s: %+v, %v after %v", name, answer, err, took)
				}
				if tc.do != 0 && err == nil {
					t.Errorf("%s: %+v", name, answer)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
}
