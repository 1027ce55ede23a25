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
	without map[iptables.Family]error // families whose listeners do not answer, and why
}

// errNoServers says that resolv.conf has not had nameservers yet.
var errNoServers = errors.New("resolv.conf names no nameserver to capture queries for")

// desired returns the value that these inputs make. The error says why there is none; capture
// then stays unchanged.
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
	served := 0
	var errs []error
	for _, f := range families() {
		switch choice, err := in.Config.Family(f), in.without[f]; {
		case choice == iptables.Off:
		case err == nil:
			served++
		case choice == iptables.On:
			return d, err
		default:
			errs = append(errs, err)
			d.Config = d.Config.Without(f)
		}
	}
	if served == 0 {
		return d, errors.Join(errs...)
	}
	return d, nil
}

// captures reports whether a family is captured while the switch is on.
func (in inputs) captures(f iptables.Family) bool {
	return in.Config.Family(f) != iptables.Off && in.without[f] == nil
}
