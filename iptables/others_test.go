package iptables_test

import (
	"fmt"
	"strings"
	"testing"
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

// K4, K5, K11: with Istio's own rules besides nametap's, DNS works, and status and check
// report them.
func TestBesideIstio(t *testing.T) {
	t.Parallel()
	labs(t, all(), func(l *lab) {
		t := l.t
		l.agent()
		before := l.saves()
		l.ns.Pipe(fmt.Sprintf(istioRules, l.pick("10.77.0.2/32", "fd77::2/128")),
			l.pick("iptables-", "ip6tables-")+string(l.backend)+"-restore", "--noflush", "-w", "5")
		beside := l.saves()
		c := l.apply()
		for range 3 {
			l.want("AU")
			l.wantFrom(l.server('3'), "AU") // a server that Istio's rules do not name
		}
		conn := l.socket()
		for range 100 {
			l.wantOn(conn, "AU")
		}
		status, err := c.Status(t.Context())
		if err != nil || !strings.Contains(fmt.Sprintf("%+v", status), "ISTIO_OUTPUT_DNS") {
			t.Errorf("status %+v, %v", status, err)
		}
		if said := failed(t, c); !strings.Contains(said, "ISTIO_OUTPUT_DNS") || !strings.Contains(said, "ISTIO_META_DNS_CAPTURE") {
			t.Errorf("check: %s", said)
		}
		remove(t, c)
		if after := l.saves(); withoutEmpty(after) != withoutEmpty(beside) || after == before {
			t.Errorf("after remove:\n%s\nwant:\n%s", after, beside)
		}
	})
}
