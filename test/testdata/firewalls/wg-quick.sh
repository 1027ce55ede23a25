# wg-quick up with AllowedIPs = 0.0.0.0/0, ::/0: policy routing
for family in -4 -6; do
	ip $family route add default dev wg0 table 51820
	ip $family rule add not fwmark 51820 table 51820
	ip $family rule add table main suppress_prefixlength 0
done
sysctl -q net.ipv4.conf.all.src_valid_mark=1
