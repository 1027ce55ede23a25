package egress

import (
	"errors"
	"io"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A guarded is the part of a route that the guard judges. If guard is nil, it judges nothing.
type guarded struct {
	guard   *guard.Guard
	policy  *guard.Policy
	name    wire.Name // the root as long as the name is not known
	denied  error     // why the policy does not allow the connection
	audited bool      // the client has connected to an address that is no VIP
}

// routeGuarded returns the route to a VIP of the guard or, if the policy only audits, to an address that is no VIP, or a
// refusal. It reports false for a VIP of the table.
func routeGuarded(vip netip.AddrPort, g *guard.Guard, policy *guard.Policy) (r route, found bool, err error) {
	r = route{vip: vip, guarded: guarded{guard: g, policy: policy}}
	addr := vip.Addr().Unmap()
	name := g.Name(addr)
	switch ofTable := slices.ContainsFunc(VIPs(), func(p netip.Prefix) bool { return p.Contains(addr) }); {
	case name != wire.Root:
		err = r.admit(name)
	case guard.IsVIP(addr): // the client says the name
	case policy.Enforces() || ofTable:
		return r, false, nil
	default:
		if name, r.audited = g.NameOf(addr), true; name == wire.Root {
			name, _ = wire.ParseName(addr.String()) // an address is a name of the DNS, too
		}
		_ = r.admit(name) // audit allows it
		r.hosts[0].endpoints = []string{netip.AddrPortFrom(addr, vip.Port()).String()}
	}
	return r, true, err
}

// judge sets the name of the route, and what the policy says.
func (r *route) judge(name wire.Name) {
	verdict, rule := r.policy.Judge(name, dns.TypeA)
	r.name, r.denied = name, nil
	if verdict != guard.Carried {
		r.denied = refuse(ReasonDenied, "%s (%s): %s", hostText(name), r.vip, r.policy.Reason(verdict, rule))
	} else if !slices.Contains(rule.Ports, r.vip.Port()) {
		r.denied = refuse(ReasonPort, "%s port %d: guard: %s allows only the ports %s", hostText(name), r.vip.Port(), rule, portsText(rule.Ports))
	}
}

// admit adds the name of the route, or returns a refusal.
func (r *route) admit(name wire.Name) error {
	if r.judge(name); r.denied != nil && r.policy.Enforces() {
		return r.denied
	}
	r.hosts = append(r.hosts, vipHost{name: name, port: r.vip.Port(), known: true})
	return nil
}

// reach returns to which addresses the connection may lead.
func (r *route) reach() reach {
	switch {
	case r.audited:
		return anywhere
	case r.policy.Enforces() && !r.policy.Private:
		return publicly
	}
	return normally
}

// record records for the guard whether the connection is carried. In audit, what enforce would refuse is not.
func (r *route) record(carried bool) {
	if r.guard != nil {
		r.guard.Connected(r.name, r.vip, carried && r.denied == nil)
	}
}

// look returns the first bytes of a client that are for a name of the guard, or a refusal. As long as the client sends
// nothing, look waits: the host may speak first. In audit, the name that the client says is recorded, and nothing is refused.
func (s *Server) look(c *conn, b *beginning, r *route) ([]byte, error) {
	defer b.release()
	b.readMore(1)
	if len(b.read) == 0 && !errors.Is(b.err, io.EOF) {
		return nil, b.err
	}
	var err error
	if len(b.read) > 0 {
		_ = c.client.SetReadDeadline(time.Now().Add(helloTimeout))
		_, err = b.readName(r)
		_ = c.client.SetReadDeadline(time.Time{})
	}
	if !r.policy.Enforces() {
		r.denied, err = errors.Join(r.denied, err), nil
	}
	r.record(err == nil)
	return b.read, err
}
