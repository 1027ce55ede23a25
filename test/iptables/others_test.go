package iptables_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/istiocni"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/iptables"
)

// istioRules are the rules of istio-iptables for DNS, with Istio's agent as uid and gid
// 1337 on port 15053, for one nameserver.
const istioRules = `*nat
:ISTIO_OUTPUT - [0:0]
:ISTIO_OUTPUT_DNS - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A OUTPUT -p udp -m udp --dport 53 -j ISTIO_OUTPUT_DNS
-A OUTPUT -p tcp -m tcp --dport 53 -j ISTIO_OUTPUT_DNS
-A ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --uid-owner 1337 -j RETURN
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --gid-owner 1337 -j RETURN
-A ISTIO_OUTPUT_DNS -d %[1]s -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT_DNS -d %[1]s -p tcp -m tcp --dport 53 -m owner ! --uid-owner 1337 -j REDIRECT --to-ports 15053
COMMIT
*raw
:ISTIO_INBOUND - [0:0]
:ISTIO_OUTPUT_DNS - [0:0]
-A PREROUTING -j ISTIO_INBOUND
-A OUTPUT -j ISTIO_OUTPUT_DNS
-A ISTIO_INBOUND -s %[1]s -p udp -m udp --sport 53 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --uid-owner 1337 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --sport 15053 -m owner --uid-owner 1337 -j CT --zone 2
-A ISTIO_OUTPUT_DNS -p udp -m udp --dport 53 -m owner --gid-owner 1337 -j CT --zone 1
-A ISTIO_OUTPUT_DNS -p udp -m udp --sport 15053 -m owner --gid-owner 1337 -j CT --zone 2
-A ISTIO_OUTPUT_DNS -d %[1]s -p udp -m udp --dport 53 -j CT --zone 2
COMMIT
`

// K4, K5, K11: with Istio's own rules besides nametap's, DNS works, and status and check report them.
func TestBesideIstio(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		l.ns.Pipe(fmt.Sprintf(istioRules, l.pick("10.77.0.2/32", "fd77::2/128")), l.tool("-restore"), "--noflush", "-w", "5")
		beside := l.saves()
		c := l.apply()
		l.wantBeside(c, "ISTIO_OUTPUT_DNS", "ISTIO_META_DNS_CAPTURE")
		remove(t, c)
		if after := l.saves(); after != beside {
			t.Errorf("after remove:\n%s\nwant:\n%s", after, beside)
		}
	})
}

// wantBeside checks that each query takes the way through the agent once although other rules capture DNS, that status
// names them, and that check advises against them.
func (l *lab) wantBeside(c *iptables.Capture, name, advice string) {
	l.t.Helper()
	for range 3 {
		l.want("AU")
		l.wantFrom(l.server('3'), "AU") // a server that Istio's rules do not name
	}
	conn := l.socket()
	for range 10 {
		l.wantOn(conn, "AU")
	}
	status, err := c.Status(l.t.Context())
	if err != nil || !strings.Contains(fmt.Sprintf("%+v", status), name) {
		l.t.Errorf("status %+v, %v", status, err)
	}
	if said := failed(l.t, c); !strings.Contains(said, name) || !strings.Contains(said, advice) {
		l.t.Errorf("check: %s", said)
	}
}

// K20: in a pod of Istio's ambient mode, each query takes the way through the agent once, whether istio-cni has its
// rules before or after nametap. Status and check name ztunnel.
func TestBesideAmbient(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"istio-cni", "nametap"} {
		t.Run(first+" first", func(t *testing.T) {
			labs(t, diagonal(), func(l *lab) {
				l.agent()
				c := l.capture(func(c *iptables.Config) { c.Pod = true })
				if first == "nametap" {
					apply(l.t, c)
				}
				l.ns.Pipe(istiocni.Ambient(l.family == family.IPv6), l.tool("-restore"), "--noflush", "-w", "5")
				if first == "istio-cni" {
					apply(l.t, c)
				}
				l.wantBeside(c, "table nat, chain ISTIO_OUTPUT", `ambient.istio.io/dns-capture: "false"`)
			})
		})
	}
}

// K20: status and check name rules of istio-cni that the tools of iptables do not show.
func TestBesideNativeAmbient(t *testing.T) {
	t.Parallel()
	netns.Need(t, "nft")
	alone(t, func(l *lab) {
		c := l.apply(func(c *iptables.Config) { c.Backend, c.Pod = iptables.NFT, true })
		named := func() bool {
			status, err := c.Status(t.Context())
			if err != nil {
				t.Error(err)
			}
			return strings.Contains(fmt.Sprintf("%+v", status), "istio-ambient-nat") && strings.Contains(failed(t, c), "ambient.istio.io/dns-capture")
		}
		if named() {
			t.Error("named without the table")
		}
		l.sh("nft add table inet istio-ambient-nat")
		if !named() {
			t.Error("the table is not named")
		}
	})
}

// K20: outside of a pod, rules of the host for the agent's queries (DNAT) apply to them.
func TestRulesOfHostApply(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		l.agent()
		l.apply()
		for _, network := range []string{"udp", "tcp"} {
			l.sh("%s -w 5 -t nat -A OUTPUT -d %s -p %s --dport 53 -j DNAT --to-destination %s",
				l.tool(""), l.pick("10.77.0.9", "fd77::9"), network, l.pick("10.77.0.3", "fd77::3"))
			if reply, err := ask(network, "-", l.server('9'), "9q"); err != nil || reply != "9qAU" {
				l.t.Errorf("%s: reply %q, %v", network, reply, err)
			}
		}
	})
}
