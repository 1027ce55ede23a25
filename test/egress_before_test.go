package test

import (
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// E1: a client that connected to a VIP before the rules were installed reaches the host with its next SYN.
func TestEgressBefore(t *testing.T) {
	t.Parallel()
	netns.Need(t, "conntrack")
	for _, backend := range []string{"nft", "legacy"} {
		t.Run(backend, func(t *testing.T) {
			t.Parallel()
			e := newEgressVM(t, backend)
			e.net.Serve(serverA+":7", greeter("one"))
			e.net.Serve("["+server6A+"]:7", greeter("one"))
			greetings := map[string]chan string{vipA: make(chan string, 1), vip6A: make(chan string, 1)}
			for vip, family := range map[string]string{vipA: "ipv4", vip6A: "ipv6"} {
				tool := strings.ReplaceAll(family, "ipv4", "iptables-"+backend)
				e.Exec(strings.ReplaceAll(tool, "ipv6", "ip6tables-"+backend), "-w", "-t", "nat", "-A", "OUTPUT",
					"-p", "tcp", "--dport", "9", "-j", "REDIRECT") // so that connections are tracked
				e.net.Exec("ip", "route", "add", "blackhole", vip) // as routers of providers
				go func() { greetings[vip] <- e.greeting(vip, "7") }()
				wait.Until(t, "the SYN is tracked", func() bool {
					return strings.Contains(e.Exec("conntrack", "-L", "-f", family, "-p", "tcp", "-d", vip), "SYN_SENT")
				})
			}
			e.capture()
			for vip, greeting := range greetings {
				if got := wait.For(t, "the connection ends", greeting); got != "220 one" {
					t.Errorf("%s: %q", vip, got)
				}
			}
		})
	}
}
