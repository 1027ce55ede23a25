package test

import (
	"strings"
	"testing"
)

// E1: on a host without a default route, connections to VIPs need the routes of docs/egress.md.
func TestEgressRoute(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.net.Serve(serverA+":3306", greeter("one"))
	e.Exec("ip", "route", "del", "default")
	e.Exec("ip", "-6", "route", "del", "default")
	e.capture()
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "3306"); !strings.Contains(got, "unreachable") {
			t.Errorf("%s without a route: %q", vip, got)
		}
	}
	e.Exec("ip", "route", "add", "240.0.0.0/4", "dev", "lo")
	e.Exec("ip", "route", "add", "2001:2::/48", "dev", "lo")
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "3306"); got != "220 one" {
			t.Errorf("%s with the route: %q", vip, got)
		}
	}
}
