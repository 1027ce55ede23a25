package test

import "strings"

const all = "UDP4 TCP4 UDP6 TCP6"

// Scripts of rulesets.
const (
	defaultRoute = "ip -6 route add default via fd00::53\n"
	// outputDrop lets a host send to loopback and to nameservers, with the tool of iptables.
	outputDrop = `both -A OUTPUT -o lo -j ACCEPT
both -A OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
both -A OUTPUT -p udp --dport 53 -j ACCEPT
both -A OUTPUT -p tcp --dport 53 -j ACCEPT
ip6tables -A OUTPUT -p ipv6-icmp -j ACCEPT
both -P OUTPUT DROP
`
	// inputDrop lets a host receive from its loopback addresses, with the tool of iptables.
	inputDrop = `iptables -A INPUT -s 127.0.0.1 -i lo -j ACCEPT
ip6tables -A INPUT -s ::1 -i lo -j ACCEPT
both -A INPUT ! -i lo -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
ip6tables -A INPUT -p ipv6-icmp -j ACCEPT
both -P INPUT DROP
`
	// outputChain is like outputDrop, as an nft base chain of a family and a priority.
	outputChain = `nft add table FAMILY site
nft 'add chain FAMILY site out { type filter hook output priority PRIORITY; policy drop; }'
nft 'add rule FAMILY site out oif lo accept'
nft 'add rule FAMILY site out ct state established,related accept'
nft 'add rule FAMILY site out udp dport 53 accept'
nft 'add rule FAMILY site out tcp dport 53 accept'
nft 'add rule FAMILY site out meta l4proto ipv6-icmp accept'
`
	// inputChain is like inputDrop, as an nft base chain of a hook and a priority.
	inputChain = `nft add table inet site
nft 'add chain inet site in { type filter hook HOOK priority PRIORITY; }'
nft 'add rule inet site in iif lo ip saddr != 127.0.0.0/8 drop'
nft 'add rule inet site in iif lo ip6 saddr != ::1 drop'
`
)

// allowed is the rule of docs/operations.md for chains that drop redirected packets: for the family, the
// table and the chain.
func allowed(chain string) string {
	return "\nfor p in udp tcp; do nft insert rule " + chain + " meta l4proto $p ct status dnat ct original proto-dst 53 ct reply proto-src 15053 accept; done\n"
}

// chained returns the script of an nft base chain.
func chained(script string, oldNew ...string) string {
	return strings.NewReplacer(oldNew...).Replace(script)
}

// rulesets returns the rulesets that the project knows of.
func rulesets() []ruleset {
	tailscale := ruleset{tunnel: "tailscale0", own: [2]string{"100.101.102.103", "fd7a:115c:a1e0::1234"},
		servers: [2]string{"100.100.100.100", "fd7a:115c:a1e0::53"}}
	cgnat := tailscale // the host's address is in a range that ts-input drops off tailscale0
	cgnat.tunnel, cgnat.own, cgnat.servers = "uplink", [2]string{"100.70.0.1", "fd70::1"}, [2]string{"10.99.0.53", "fd70::53"}
	wg := ruleset{tunnel: "wg0", own: [2]string{"10.64.0.2", "fd64::2"}, servers: [2]string{"10.64.0.1", "fd64::1"}}
	cluster := [2]string{"10.96.0.10", "fd00:96::10"}
	with := func(r ruleset, name, script string, passes ...string) ruleset {
		r.name, r.script, r.passes = name, script, strings.Join(passes, " ")
		return r
	}
	clusterRoutes := "ip route add 10.96.0.0/12 dev eth0\nip -6 route add fd00:96::/112 dev eth0\n"
	return []ruleset{
		{name: "no other rules"},
		{name: "ufw deny outgoing", script: "restore ufw"},
		{name: "ufw deny outgoing, legacy", script: "restore ufw", legacy: true},
		with(tailscale, "Tailscale", ". ./tailscale.sh; restore tailscale"),
		with(tailscale, "Tailscale, nft", ". ./tailscale.sh; nft -f tailscale.nft", "UDP4 TCP4"),
		with(cgnat, "Tailscale, host behind CGNAT", "ip link add tailscale0 type veth; ip link set tailscale0 up; ip route add 10.99.0.53 dev uplink; ip -6 route add fd70::53 dev uplink; . ./tailscale.sh; restore tailscale"),
		with(cgnat, "Tailscale, host behind CGNAT, nft", "ip link add tailscale0 type veth; ip link set tailscale0 up; ip route add 10.99.0.53 dev uplink; ip -6 route add fd70::53 dev uplink; . ./tailscale.sh; nft -f tailscale.nft", "UDP4 TCP4"),
		with(wg, "wg-quick", ". ./wg-quick.sh; restore wg-quick"),
		with(wg, "wg-quick, nft", ". ./wg-quick.sh; nft -f wg-quick.nft", all),
		with(wg, "wg-quick, nft, with nametap's rule", ". ./wg-quick.sh; nft -f wg-quick.nft; nft insert rule ip wg-quick-wg0 preraw iif lo accept; nft insert rule ip6 wg-quick-wg0 preraw iif lo accept"),
		with(wg, "wg-quick with a kill switch", ". ./wg-quick.sh; restore wg-quick\nboth -I OUTPUT ! -o wg0 -m mark ! --mark 51820 -m addrtype ! --dst-type LOCAL -j REJECT"),
		{name: "INPUT -s 127.0.0.1", script: inputDrop},
		{name: "INPUT -s 127.0.0.1, legacy", script: inputDrop, legacy: true},
		{name: "INPUT -s 127.0.0.1, nft", script: chained(inputChain, "HOOK", "input", "PRIORITY", "0"), passes: all},
		{name: "INPUT -s 127.0.0.1, nft, with nametap's rule", script: chained(inputChain, "HOOK", "input", "PRIORITY", "0") + allowed("inet site in")},
		{name: "INPUT reject, nft", script: strings.ReplaceAll(chained(inputChain, "HOOK", "input", "PRIORITY", "0"), "drop'", "reject with icmpx admin-prohibited'"), passes: all},
		{name: "OUTPUT drop, oif lo", script: outputDrop},
		{name: "OUTPUT drop, oif lo, nft", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "0"), passes: all},
		{name: "OUTPUT reject, nft", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "0", "policy drop", "policy accept") + "nft 'add rule inet site out reject with icmpx host-unreachable'\n", passes: all},
		{name: "OUTPUT drop, oif lo, nft, with nametap's rule", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "0") + allowed("inet site out")},
		{name: "OUTPUT drop before NAT, nft", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "-150")},
		{name: "OUTPUT drop at priority 100, nft", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "100"), passes: all},
		{name: "OUTPUT drop of IPv4, nft", script: chained(outputChain, "FAMILY", "ip", "PRIORITY", "0", "ipv6-icmp", "icmp"), passes: "UDP4 TCP4"},
		{name: "OUTPUT drop of IPv6, nft", script: chained(outputChain, "FAMILY", "ip6", "PRIORITY", "0"), passes: "UDP6 TCP6"},
		{name: "OUTPUT drop of TCP, nft", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "0", "udp dport 53", "meta l4proto udp"), passes: all},
		{name: "no other rules, no IPv6 nameserver", unnamed: true},
		{name: "no other rules, no IPv6 nameserver, default route", script: defaultRoute, unnamed: true},
		{name: "OUTPUT drop, nft, no IPv6 nameserver", script: chained(outputChain, "FAMILY", "inet", "PRIORITY", "0"), passes: all, unnamed: true},
		{name: "OUTPUT drop, nft, no IPv6 nameserver, default route", script: defaultRoute + chained(outputChain, "FAMILY", "inet", "PRIORITY", "0"), passes: all, unnamed: true},
		{name: "OUTPUT drop of IPv6, nft, no IPv6 nameserver, default route", script: defaultRoute + chained(outputChain, "FAMILY", "ip6", "PRIORITY", "0"), passes: "UDP6 TCP6", unnamed: true},
		{name: "INPUT -s 127.0.0.1, nft, no IPv6 nameserver", script: chained(inputChain, "HOOK", "input", "PRIORITY", "0"), passes: all, unnamed: true},
		{name: "INPUT -s 127.0.0.1, nft, no IPv6 nameserver, default route", script: defaultRoute + chained(inputChain, "HOOK", "input", "PRIORITY", "0"), passes: all, unnamed: true},
		{name: "PREROUTING drop, nft", script: chained(inputChain, "HOOK", "prerouting", "PRIORITY", "-300"), passes: all},
		{name: "PREROUTING drop of own addresses", script: "iptables -t raw -A PREROUTING ! -i eth0 -s 10.0.0.0/24 -j DROP; ip6tables -t raw -A PREROUTING ! -i eth0 -s fd00::/64 -j DROP"},
		{name: "mangle INPUT drop", script: "iptables -t mangle -A INPUT -i lo ! -s 127.0.0.0/8 -j DROP; ip6tables -t mangle -A INPUT -i lo ! -s ::1 -j DROP", passes: all},
		{name: "reverse path filter", script: "both -t raw -A PREROUTING -m rpfilter --invert -j DROP\nsysctl -q net.ipv4.conf.all.rp_filter=1"},
		{name: "reverse path filter, nft", script: "nft add table inet site; nft 'add chain inet site pre { type filter hook prerouting priority -290; }'; nft 'add rule inet site pre fib saddr . mark . iif oif missing drop'"},
		{name: "drop of loopback addresses off lo", script: "iptables -A OUTPUT ! -o lo -d 127.0.0.0/8 -j DROP; ip6tables -A OUTPUT ! -o lo -d ::1 -j DROP"},
		{name: "firewall in the other backend", script: "nft flush ruleset; BACKEND=-legacy\n" + outputDrop + "BACKEND=-nft; for i in 1 2 3 4 5 6 7 8 9; do both -t nat -A POSTROUTING -o docker0 -j MASQUERADE; done", passes: all},
		{name: "firewalld, nft", script: "nft -f firewalld.nft", passes: "UDP6 TCP6"},
		{name: "firewalld, drop by a policy, nft", script: "nft -f firewalld-drop.nft", passes: all},
		{name: "firewalld, drop by a policy, nft, with nametap's ports", script: "grep -v 'ip6 daddr.*reject' firewalld-drop.nft | nft -f -; for p in udp tcp; do nft add rule inet firewalld filter_OUT_policy_out_allow $p dport 15053 accept; done"},
		{name: "firewalld, drop by a policy", script: "restore firewalld-drop"},
		{name: "Docker", script: "iptables-restore -n <docker.v4"},
		{name: "Docker's resolver", script: "iptables-restore -n <docker-dns.v4\nip6tables -t nat -A OUTPUT -d fd00:11::11 -p udp --dport 53 -j DNAT --to-destination [fd00:11::11]:33053\nip6tables -t nat -A OUTPUT -d fd00:11::11 -p tcp --dport 53 -j DNAT --to-destination [fd00:11::11]:33053",
			servers: [2]string{"127.0.0.11", "fd00:11::11"}, local: true, port: 33053},
		{name: "kube-proxy", script: clusterRoutes + "restore kube-proxy", servers: cluster},
		{name: "kube-proxy, nft", script: clusterRoutes + "nft -f kube-proxy.nft", servers: cluster, passes: all},
		{name: "node-local DNS without conntrack", script: "both -t raw -A OUTPUT -p udp --dport 53 -j NOTRACK; both -t raw -A PREROUTING -p udp --sport 53 -j NOTRACK"},
		{name: "no conntrack for DNS", script: "for p in udp tcp; do both -t raw -A OUTPUT -p $p --dport 53 -j NOTRACK; both -t raw -A PREROUTING -p $p --sport 53 -j NOTRACK; done", passes: "TCP4 TCP6"},
		{name: "no conntrack for DNS, nft", script: "nft add table inet site; nft 'add chain inet site out { type filter hook output priority -301; }'; nft 'add rule inet site out udp dport 53 notrack'; nft 'add rule inet site out tcp dport 53 notrack'", passes: all},
		{name: "Calico", script: "restore calico"},
		{name: "Istio's ambient mode", ambient: true},
		{name: "local rule moved", script: "for f in -4 -6; do ip $f rule add pref 100 lookup local; ip $f rule del pref 0; done"},
		{name: "source rule before the moved local rule", script: "for f in -4 -6; do ip $f rule add pref 100 lookup local; ip $f rule del pref 0; done\nip rule add pref 10 from 10.0.0.1 to 127.0.0.0/8 lookup 100; ip route add default via 10.0.0.53 table 100\nip -6 rule add pref 10 from fd00::1 to ::1 lookup 100; ip -6 route add default via fd00::53 table 100", passes: "UDP4 TCP4 UDP6 TCP6"},
		{name: "source routes", script: "ip address add 10.9.0.1/32 dev lo; ip route replace 10.0.0.53 dev eth0 src 10.0.0.1; ip rule add from 10.0.0.1 lookup 100; ip route add default via 10.0.0.54 table 100"},
		{name: "DNS for root alone", script: "for p in udp tcp; do both -A OUTPUT -p $p --dport 53 -m owner ! --uid-owner 0 -j REJECT; done", passes: all},
		{name: "DNS for root alone, nft", script: "nft add table inet site; nft 'add chain inet site out { type filter hook output priority 0; }'; nft 'add rule inet site out meta l4proto { tcp, udp } th dport 53 meta skuid != 0 drop'", passes: all},
		{name: "TTL of probes by default", script: "sysctl -qw net.ipv4.ip_default_ttl=217; ip -6 route replace fd00::53 dev eth0 hoplimit 217"},
		{name: "marks overwritten", script: "both -t mangle -A OUTPUT -j MARK --set-mark 5"},
		{name: "marks overwritten, and redirected packets dropped, nft", script: "both -t mangle -A OUTPUT -j MARK --set-mark 5\nnft add table inet site; nft 'add chain inet site in { type filter hook input priority 10; }'; nft 'add rule inet site in iif lo ct status dnat drop'", passes: all},
		{name: "marks restored", script: "both -t mangle -A OUTPUT -j CONNMARK --restore-mark"},
	}
}
