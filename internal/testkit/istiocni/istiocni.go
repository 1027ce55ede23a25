// Package istiocni has the rules that Istio's CNI plugin installs in pods.
package istiocni

import "fmt"

// ambient are the rules for a pod of Istio's ambient mode with DNS capture, for one family. %[1]s is
// loopback, and %[2]s the address from which kubelet's probes come.
const ambient = `*mangle
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A OUTPUT -j ISTIO_OUTPUT
-A PREROUTING -j ISTIO_PRERT
-A ISTIO_PRERT -s %[2]s -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d %[1]s -p tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -d %[2]s -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-port 15053
-A ISTIO_OUTPUT ! -d %[1]s -p tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d %[1]s -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d %[1]s -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
*raw
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
COMMIT
`

// Ambient returns the input for iptables-restore, or ip6tables-restore, that makes the rules for a pod of
// Istio's ambient mode with DNS capture: they redirect port 53 to port 15053, except for packets that
// ztunnel has marked.
func Ambient(ipv6 bool) string {
	if ipv6 {
		return fmt.Sprintf(ambient, "::1/128", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128")
	}
	return fmt.Sprintf(ambient, "127.0.0.1/32", "169.254.7.127/32")
}
