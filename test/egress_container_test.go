package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// E1, E11, K6: connections of a container to VIPs reach their hosts, and its UDP packets to VIPs are refused.
func TestEgressContainer(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	for addr, name := range map[string]string{serverA: "one", serverB: "two"} {
		e.net.Serve(addr+":3306", greeter(name))
	}
	container := netns.New(t)
	netns.Connect(
		netns.End{NS: e.NS, Name: "docker0", Addrs: []string{"172.17.0.1/24", "fd17::1/64"}},
		netns.End{NS: container, Name: "eth0", Addrs: []string{"172.17.0.2/24", "fd17::2/64"}},
	)
	container.Exec("ip", "route", "add", "default", "via", "172.17.0.1")
	container.Exec("ip", "-6", "route", "add", "default", "via", "fd17::1")
	e.capture("--dns-addr", ":15053", "--egress-addr", ":"+egressPort, "--capture-virtual-interface", "docker0")
	inside := &egressVM{vm: &vm{host: &host{NS: container, tb: t}}}
	for vip, want := range map[string]string{vipA: "220 one", vipB: "220 two", vip6A: "220 one", vip6B: "220 two"} {
		if got := inside.greeting(vip, "3306"); got != want {
			t.Errorf("the container, %s: %q, want %q", vip, got, want)
		}
		if got := e.greeting(vip, "3306"); got != want {
			t.Errorf("the host, %s: %q, want %q", vip, got, want)
		}
	}
	for _, vip := range []string{vipA, vip6A} {
		if err := inside.sendUDP(vip); !isRefused(err) {
			t.Errorf("the container, UDP to %s: %v, want that it is refused", vip, err)
		}
	}
	// The listener is on all addresses, but only connections to VIPs are carried.
	if got := inside.greeting("172.17.0.1", egressPort); !strings.Contains(got, "reset") || e.refusals("direct") != 1 {
		t.Errorf("a connection of the container to the listener itself: %q, %v refusals", got, e.refusals("direct"))
	}
}
