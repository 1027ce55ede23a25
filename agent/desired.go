package agent

import (
	"errors"
	"net/netip"

	"github.com/nametap/nametap/iptables"
)

// inputs are the inputs of the desired value.
type inputs struct {
	CaptureConfig
	servers []netip.Addr              // of resolv.conf; none until it has any
	without map[iptables.Family]error // families that are left out, and why
}

// errNoServers says that resolv.conf has not had nameservers yet.
var errNoServers = errors.New("resolv.conf names no nameserver whose queries to capture")

// desired returns the value that these inputs make. The error says why there is none; capture
// then stays as it is.
func (in inputs) desired() (iptables.Desired, error) {
	d := iptables.Desired{On: in.On, Because: in.Because, Config: in.Config}
	if !in.On {
		return d, nil
	}
	if in.Servers == ResolvConfServers {
		if len(in.servers) == 0 { // none would mean all
			return d, errNoServers
		}
		d.Config.Servers = in.servers
	}
	left := 0
	for _, f := range families() {
		err := in.without[f]
		switch choice := in.Config.Family(f); {
		case err != nil && choice == iptables.On:
			return d, err
		case err != nil:
			d.Config = d.Config.Without(f)
		case choice != iptables.Off:
			left++
		}
	}
	if left == 0 {
		return d, errors.Join(in.without[iptables.IPv4], in.without[iptables.IPv6])
	}
	return d, nil
}
