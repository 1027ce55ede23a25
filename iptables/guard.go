package iptables

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
)

// A Guard bounds what programs reach: this host itself, the agent, the VIPs of [Config] and the networks of Direct. The rest
// is refused: TCP by a reset, other packets by an ICMP error. Connections that are open when the rules are installed go on,
// and so do answers to packets that came in.
//
// The rules of a Guard are in chains of table filter, for both families, also for one whose queries are not captured. They
// have no lease, and there is no variant without them: a machine that lacks what they need has no rules at all.
type Guard struct {
	// Direct lists what programs reach without a VIP.
	Direct []Direct
	// Audit refuses nothing. Connections over TCP to other addresses are redirected to EgressPort while the lease has time
	// left, and the rules count other packets.
	Audit bool
}

// A Direct is a network and a port over TCP and UDP; port 0 means all ports and protocols. Port 53 and port 853 of a network
// are refused unless the port is given: queries to nameservers go to the agent.
type Direct struct {
	Prefix netip.Prefix
	Port   uint16
}

// Enforces reports whether packets are refused. A nil Guard refuses none.
func (g *Guard) Enforces() bool { return g != nil && !g.Audit }

// The chains of a Guard: for packets of this host, and for those of virtual interfaces, which have no owner.
const (
	guardChain        = ownPrefix + "GUARD"
	guardForwardChain = guardChain + "_FORWARD"
)

// GuardHops is the TTL or hop limit of the agent's packets that a [Guard] treats like those of other programs. So the agent
// can try, without a capability, whether packets are refused. If they are not, the first router discards these.
const GuardHops = 1

// guardedComment is the comment of the rules for packets that the guard refuses.
const guardedComment = "not in the policy"

// guard makes the chains of the guard in table filter.
func (b builder) guard() []chain {
	if b.cfg.Guard == nil {
		return nil
	}
	// The rules of table nat do not change the interface of a packet that they redirect.
	rules := []string{
		b.rule("-o lo", "this host", "RETURN"),
		b.rule("-d "+b.loopback()+" -m conntrack --ctstate DNAT", "redirected", "RETURN"),
	}
	for _, agent := range b.agents() {
		rules = append(rules, b.rule(strings.Replace(b.hopsMatch(), " --", " ! --", 1)+" "+strconv.Itoa(GuardHops)+" "+agent, "the agent", "RETURN"))
	}
	// Connection tracking may not know all connections that are open. A container could send such packets without one.
	rules = append(rules, b.rule("-p tcp -m tcp ! "+synOnly, "open", "RETURN"))
	chains := []chain{{name: guardChain, parent: "OUTPUT", jumps: []string{b.rule("", "guard", guardChain)}, rules: append(rules, b.guarded()...)}}
	if len(b.cfg.VirtualInterfaces) > 0 {
		forward := chain{name: guardForwardChain, parent: "FORWARD", rules: b.guarded()}
		for _, name := range b.cfg.VirtualInterfaces {
			forward.jumps = append(forward.jumps, b.rule("-i "+name, "guard", guardForwardChain))
		}
		chains = append(chains, forward)
	}
	return chains
}

// guarded makes the rules of the guard for packets of programs.
func (b builder) guarded() []string {
	refuse := func(protocol string) string { return "REJECT --reject-with " + b.refusal(protocol) }
	if b.cfg.Guard.Audit {
		refuse = func(string) string { return "RETURN" }
	}
	rules := []string{b.rule("-m conntrack --ctstate RELATED,ESTABLISHED", "open", "RETURN")}
	if b.family == family.IPv6 { // RFC 4890, section 4.4.1: neighbour discovery, and the groups that it needs. No router forwards these
		for _, icmp := range []int{131, 132, 143} {
			rules = append(rules, b.rule("-d ff00::/8 -p ipv6-icmp -m icmp6 --icmpv6-type "+strconv.Itoa(icmp), "neighbours", "RETURN"))
		}
		for _, icmp := range []int{133, 135, 136} {
			rules = append(rules, b.rule("-p ipv6-icmp -m icmp6 --icmpv6-type "+strconv.Itoa(icmp)+" "+b.hopsMatch()+" 255", "neighbours", "RETURN"))
		}
	}
	rules = append(rules, b.direct(true, "udp", "tcp")...)
	for _, port := range []int{dnsPort, 853} { // queries that the rules of table nat have not redirected
		for _, p := range []string{"udp", "tcp"} {
			rules = append(rules, b.rule(fmt.Sprintf("-p %s -m %s --dport %d", p, p, port), guardedComment, refuse(p)))
		}
	}
	rules = append(rules, b.direct(false)...)
	for _, p := range []string{"tcp", "udp", ""} {
		rules = append(rules, b.rule(matches("-p", p), guardedComment, refuse(p)))
	}
	return rules
}

// refusal returns how packets of a protocol are refused.
func (b builder) refusal(protocol string) string {
	switch {
	case protocol == "tcp":
		return "tcp-reset"
	case b.family == family.IPv4:
		return "icmp-admin-prohibited"
	}
	return "icmp6-adm-prohibited"
}

// direct makes the rules for Direct that let packets pass: for the elements with a port, or for those without one.
func (b builder) direct(ports bool, protocols ...string) (rules []string) {
	for _, d := range b.cfg.Guard.Direct {
		if family.Of(d.Prefix.Addr()) != b.family || ports != (d.Port != 0) {
			continue
		}
		m := "-d " + d.Prefix.Masked().String()
		if !ports {
			rules = append(rules, b.rule(m, "direct", "RETURN"))
		}
		for _, p := range protocols {
			rules = append(rules, b.rule(fmt.Sprintf("%s -p %s -m %s --dport %d", m, p, p, d.Port), "direct", "RETURN"))
		}
	}
	return rules
}

// audited makes the chain of table nat that redirects connections which a guard would refuse, but none to linkLocal.
func (b builder) audited() []chain {
	if b.cfg.Guard == nil || !b.cfg.Guard.Audit || len(b.cfg.vipRanges(b.family)) == 0 {
		return nil
	}
	rules := append(b.unleasedRules(), b.rule("-o lo", "this host", "RETURN"))
	for _, agent := range b.agents() {
		rules = append(rules, b.rule(agent, "the agent", "RETURN"))
	}
	rules = slices.Concat(rules, b.direct(true, "tcp"), b.direct(false))
	return []chain{{
		name: guardChain, parent: "OUTPUT", jumps: []string{b.rule("-p tcp -m tcp "+synOnly, "audit", guardChain)},
		rules: append(rules, b.rule(matches("! -d", map[family.Family]string{family.IPv6: linkLocal}[b.family], "-p", "tcp"), guardedComment, fmt.Sprintf("REDIRECT --to-ports %d", b.cfg.EgressPort))),
	}}
}

// guardOnly returns the rules of the guard in table filter alone.
func (r Rules) guardOnly() Rules {
	only := Rules{families: make(map[family.Family][]table)}
	for _, f := range family.All() {
		t := r.table(f, filterTable)
		t.chains = slices.DeleteFunc(slices.Clone(t.chains), func(c chain) bool { return !strings.HasPrefix(c.name, guardChain) })
		if len(t.chains) > 0 {
			only.families[f] = []table{t}
		}
	}
	return only
}

// GuardState says what the rules of a guard do.
type GuardState string

// The states of the rules of a guard; "" without such rules.
const (
	GuardEnforces GuardState = "enforce"
	GuardAudits   GuardState = "audit"
)

// guardState returns what the saved rules of a family do.
func (s saved) guardState() GuardState {
	filter := s[filterTable]
	if !slices.ContainsFunc(filter.jumps(), func(r savedRule) bool { return r.chain == "OUTPUT" && r.target == guardChain }) {
		return ""
	}
	if slices.ContainsFunc(filter.rules, func(r savedRule) bool { return r.chain == guardChain && r.target == "REJECT" }) {
		return GuardEnforces
	}
	return GuardAudits
}

// guardCounts returns how many packets of each protocol, which the policy does not have, the rules of an audit have let pass.
func (s saved) guardCounts() map[string]uint64 {
	counts := make(map[string]uint64)
	for _, r := range s[filterTable].rules {
		if strings.HasPrefix(r.chain, guardChain) && strings.Contains(r.spec, guardedComment) && r.packets > 0 {
			counts[cmp.Or(valueOf(words(r.spec), "-p"), "other")] += r.packets
		}
	}
	return counts
}

// validateGuard returns an error for the first network of Direct that rules cannot have.
func (c Config) validateGuard() error {
	if c.Guard == nil {
		return nil
	}
	for _, d := range c.Guard.Direct {
		if !d.Prefix.IsValid() || d.Prefix.Bits() == 0 || !canonical(d.Prefix.Masked().Addr()) {
			return fmt.Errorf("network %q without a name: want an IPv4 or IPv6 prefix, not of length 0", d.Prefix)
		}
	}
	return nil
}

// lacksFamily reports whether the kernel does not have a family, so there is nothing to guard.
func lacksFamily(f family.Family) bool {
	socket, err := unix.Socket(int(f.Number()), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(socket)
	}
	return errors.Is(err, unix.EAFNOSUPPORT)
}
