package supervise

import (
	"errors"
	"net/netip"
	"testing"
)

// TestHangs checks which probes in succession mean that the command hangs.
func TestHangs(t *testing.T) { // K15
	v4, v6 := netip.MustParseAddrPort("127.0.0.1:15053"), netip.MustParseAddrPort("[::1]:15053")
	timeout := errors.New("timeout")
	both, none := answers{v4: nil, v6: nil}, answers{v4: timeout, v6: timeout}
	one, unasked := answers{v4: nil, v6: timeout}, answers{v4: errUnasked, v6: errUnasked}
	absent := answers{v4: nil, v6: errUnasked}
	for name, test := range map[string]struct {
		probes []answers
		hangs  bool
	}{
		"none answers":                       {[]answers{both, none, none, none, none}, true},
		"none has ever answered":             {[]answers{none, none, none, none}, true},
		"one reader hangs":                   {[]answers{both, one, one, one, one}, true},
		"one family never works":             {[]answers{one, one, one, one, one, one}, false},
		"one family is switched off":         {[]answers{both, absent, absent, absent, absent, absent}, false},
		"for a short time":                   {[]answers{both, none, none, none, both, none, none, none}, false},
		"probes cannot be sent":              {[]answers{both, unasked, unasked, unasked, unasked, unasked}, false},
		"probes cannot be sent meanwhile":    {[]answers{both, none, none, unasked, none, none}, true},
		"the other reader answers meanwhile": {[]answers{both, none, one, none, one}, true},
	} {
		t.Run(name, func(t *testing.T) {
			p := &prober{answered: map[netip.AddrPort]bool{}}
			hung := 0
			for i, found := range test.probes {
				if err := p.countProbe(found); err != nil {
					hung++
					if i != len(test.probes)-1 {
						t.Errorf("it hangs after %d probes: %v", i+1, err)
					}
				}
			}
			if hung > 0 != test.hangs {
				t.Errorf("it hangs %d times", hung)
			}
		})
	}
}
