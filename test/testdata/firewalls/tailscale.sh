# the policy routing of tailscaled, which stands beside either form of its rules
for family in -4 -6; do
	ip $family rule add pref 5210 fwmark 0x80000/0xff0000 lookup main
	ip $family rule add pref 5230 fwmark 0x80000/0xff0000 lookup default
	ip $family rule add pref 5250 fwmark 0x80000/0xff0000 type unreachable
	ip $family rule add pref 5270 lookup 52
done
ip route add 100.100.100.100 dev tailscale0 table 52
ip route add 100.64.0.0/10 dev tailscale0 table 52
ip -6 route add fd7a:115c:a1e0::/48 dev tailscale0 table 52
