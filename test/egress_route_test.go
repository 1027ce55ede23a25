package test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/iptables"
)

// E1: on a host without a default route, connections to VIPs need a route. `nametap capture check` says so,
// and which one.
func TestEgressRoute(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	e.serve(serverA+":3306", greeter("one"))
	routes := func(families int) (missing []string) {
		var findings []iptables.Finding
		if r := e.parse(&findings, "check"); r.code != 0 {
			t.Fatalf("check: %+v", r)
		}
		found := 0
		for _, f := range findings {
			if !strings.HasPrefix(f.What, "route to VIPs over IPv") {
				continue
			}
			found++
			if !f.OK {
				advice, _, _ := strings.Cut(f.Advice, ";")
				missing = append(missing, advice)
			}
		}
		if found != families {
			t.Errorf("%d findings about routes, want %d: %+v", found, families, findings)
		}
		return missing
	}
	if missing := routes(2); len(missing) > 0 {
		t.Errorf("with a default route, routes are missing: %q", missing)
	}
	e.Exec("ip", "route", "del", "default")
	e.Exec("ip", "-6", "route", "del", "default")
	e.capture()
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "3306"); !strings.Contains(got, "unreachable") {
			t.Errorf("%s without a route: %q", vip, got)
		}
	}
	missing := routes(2)
	if want := []string{"ip route add 240.128.0.0/9 dev lo", "ip route add 2001:2::/48 dev lo"}; fmt.Sprint(missing) != fmt.Sprint(want) {
		t.Errorf("the advice is %q, want %q", missing, want)
	}
	for _, command := range missing {
		fields := strings.Fields(command)
		e.Exec(fields[0], fields[1:]...)
	}
	for _, vip := range []string{vipA, vip6A} {
		if got := e.greeting(vip, "3306"); got != "220 one" {
			t.Errorf("%s with the route of the advice: %q", vip, got)
		}
	}
	if missing := routes(2); len(missing) > 0 {
		t.Errorf("with the routes of the advice, routes are missing: %q", missing)
	}
	e.Exec("ip", "-6", "address", "flush", "dev", "eth0")
	if missing := routes(1); len(missing) > 0 {
		t.Errorf("without IPv6, routes are missing: %q", missing)
	}
}
