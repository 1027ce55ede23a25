package test

import (
	"strings"
	"testing"
)

// E1, E4, E7: two hosts on one port each reach their own server, over both families, and the server
// speaks first.
func TestEgress(t *testing.T) {
	t.Parallel()
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			e := newEgressVM(t, backend)
			for addr, name := range map[string]string{serverA: "one", serverB: "two"} {
				e.net.Serve(addr+":3306", greeter(name))
			}
			before := e.Rules()
			a := e.capture()
			for vip, want := range map[string]string{vipA: "220 one", vipB: "220 two", vip6A: "220 one", vip6B: "220 two"} {
				if got := e.greeting(vip, "3306"); got != want {
					t.Errorf("%s: %q, want %q", vip, got, want)
				}
			}
			if got := e.greeting(unusedVIP, "3306"); !strings.Contains(got, "reset") {
				t.Errorf("a VIP of no host: %q, want a reset", got)
			}
			a.end(terminate) // E14
			if after := e.Rules(); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}
