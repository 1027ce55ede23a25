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

// enroll installs the rules of istio-cni's ambient mode.
func (l *lab) enroll() {
	l.t.Helper()
	text := istiocni.Ambient(l.family == family.IPv6)
	l.ns.Pipe(text, l.pick("iptables-", "ip6tables-")+string(l.backend)+"-restore", "--noflush", "-w", "5")
}

// K20: in a pod of Istio's ambient mode, each query takes the way through the agent once, whether
// istio-cni has its rules before or after nametap. Status and check name ztunnel.
func TestBesideAmbient(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"istio-cni", "nametap"} {
		t.Run(first+" first", func(t *testing.T) {
			labs(t, all(), func(l *lab) {
				t := l.t
				l.agent()
				pod := func(c *iptables.Config) { c.Pod = true }
				c := l.capture(pod)
				if first == "istio-cni" {
					l.enroll()
				}
				apply(t, c)
				if first == "nametap" {
					l.enroll()
				}
				for range 3 {
					l.want("AU")
					l.wantFrom(l.server('3'), "AU")
				}
				conn := l.socket()
				for range 100 {
					l.wantOn(conn, "AU")
				}
				status, err := c.Status(t.Context())
				if err != nil || !strings.Contains(fmt.Sprintf("%+v", status), "ztunnel (Istio's ambient mode) capture port 53 too: table nat, chain ISTIO_OUTPUT") {
					t.Errorf("status %+v, %v", status, err)
				}
				if said := failed(t, c); !strings.Contains(said, "chain ISTIO_OUTPUT") || !strings.Contains(said, `ambient.istio.io/dns-capture: "false"`) ||
					strings.Contains(said, "ISTIO_META_DNS_CAPTURE") {
					t.Errorf("check: %s", said)
				}
			})
		})
	}
}

// K20: ztunnel has port 15053 of the pod, and the agent another one. The agent's queries do not go to ztunnel.
func TestBesideZtunnel(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		l.enroll()
		startPeer(l.t, l.ns).do("serve Z same - 127.0.0.1:15053 [::1]:15053")
		l.agentAs("1337 1337", "same", "-", 15055)
		l.apply(func(c *iptables.Config) { c.Pod, c.Port = true, 15055 })
		l.want("AU")
	})
}

// K20: status and check name rules of istio-cni that the tools of iptables do not show.
func TestBesideNativeAmbient(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		netns.Need(t, "nft")
		c := l.apply(func(c *iptables.Config) { c.Pod = true })
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
	labs(t, all(), func(l *lab) {
		l.agent()
		l.apply()
		for _, network := range []string{"udp", "tcp"} {
			l.sh("%s%s -w 5 -t nat -A OUTPUT -d %s -p %[4]s --dport 53 -j DNAT --to-destination %[5]s",
				l.pick("iptables-", "ip6tables-"), l.backend, l.pick("10.77.0.9", "fd77::9"), network, l.pick("10.77.0.3", "fd77::3"))
			if reply, err := ask(network, "-", l.server('9'), "9q"); err != nil || reply != "9qAU" {
				l.t.Errorf("%s: reply %q, %v", network, reply, err)
			}
		}
	})
}
