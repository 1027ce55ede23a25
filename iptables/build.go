package iptables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/nametap/nametap/internal/family"
)

// Build returns the rules for a configuration, or an error that says what is wrong with the configuration.
func Build(cfg Config) (Rules, error) {
	if err := cfg.validate(); err != nil {
		return Rules{}, err
	}
	rules := Rules{families: make(map[family.Family][]table)}
	for _, f := range family.All() {
		rules.families[f] = buildFamily(cfg, f)
	}
	return rules, nil
}

func buildFamily(cfg Config, f family.Family) []table {
	b := builder{cfg: cfg, family: f, destinations: destinations(cfg, f)}
	filter := table{name: filterTable, chains: b.guard()}
	if cfg.GuardOnly || !cfg.Has(f) || len(b.destinations) == 0 {
		return nonEmpty(filter)
	}
	redirect := fmt.Sprintf("REDIRECT --to-ports %d", cfg.Port)
	chains := b.chains(action{protocols: []string{"udp", "tcp"}, target: redirect, comment: "to the agent", vips: true})
	test := netip.PrefixFrom(TestAddr(f), TestAddr(f).BitLen()).String()
	chains[0].rules = slices.Insert(chains[0].rules, 0, b.rule(matches("-d", test, "-p", "udp"), "test query", redirect))
	nat := table{name: "nat", chains: append(chains, b.audited()...)}
	if cfg.NATOnly {
		return nonEmpty(filter, nat)
	}
	apart := b.chains(action{protocols: []string{"udp"}, target: fmt.Sprintf("CT --zone-orig %d", zone), comment: "apart from the agent"})
	raw := table{name: "raw", chains: append(b.leases(), b.addLooped(b.addReplies(apart))...)}
	filter.chains = append(filter.chains, b.accepts()...)
	return []table{filter, nat, raw}
}

// nonEmpty returns the tables that have chains.
func nonEmpty(tables ...table) []table {
	return slices.DeleteFunc(tables, func(t table) bool { return len(t.chains) == 0 })
}

// TestAddr returns the test address of a family. The rules redirect UDP queries to this address, whichever user
// sends them. So the agent can send such a query to find out whether queries are captured. It needs no capability
// for this. No nameserver has these addresses: the IPv4 address is on loopback, and every router discards packets
// to the IPv6 address (RFC 6666).
func TestAddr(f family.Family) netip.Addr {
	if f == family.IPv4 {
		return netip.AddrFrom4([4]byte{127, 15, 0, 53})
	}
	return netip.AddrFrom16([16]byte{0: 1, 15: 53})
}

// ProbeHops is the TTL or hop limit of the agent's probes, which are queries that test whether the rules redirect
// queries to the agent. The rules recognise probes by this value, and redirect them like queries of clients. No
// system uses this value by default, and the agent sets another value for its other queries. The rules do not
// recognise probes by a mark: it would need a capability, rules of other programs change marks, and routes and
// firewalls treat marked packets differently.
const ProbeHops = 217

// builder makes the chains of one family.
type builder struct {
	cfg          Config
	family       family.Family
	destinations []destination
}

// chains makes the chains of one table.
func (b builder) chains(a action) []chain {
	output := chain{name: outputChain, parent: "OUTPUT"}
	for _, p := range a.protocols {
		if b.cfg.Lease || !b.cfg.NATOnly {
			output.rules = append(output.rules, b.rule(fmt.Sprintf("-p %s %s %d", p, b.hopsMatch(), ProbeHops), "probe of the agent", a.target))
		}
	}
	output.rules = slices.Concat(output.rules, b.unleasedRules(), b.owners(a.vips && b.cfg.Pod), b.exclusions())
	for _, name := range b.cfg.ExcludeInterfaces {
		output.rules = append(output.rules, b.rule("-o "+name, "excluded interface", "RETURN"))
	}
	if a.vips {
		output.rules = append(output.rules, b.vips("")...)
	}
	for _, d := range b.destinations {
		for _, p := range a.protocols {
			output.rules = append(output.rules, b.rule(matches("-d", d.address, "-o", d.outInterface, "-p", p), a.comment, a.target))
		}
	}
	chains := []chain{output}
	if len(b.cfg.VirtualInterfaces) > 0 {
		chains = append(chains, b.prerouting(a))
	}
	for i := range chains {
		for _, p := range a.protocols {
			m := fmt.Sprintf("-p %s -m %s --dport %d", p, p, dnsPort)
			if p == "tcp" {
				m += " " + synOnly
			}
			chains[i].jumps = append(chains[i].jumps, b.rule(m, "DNS over "+strings.ToUpper(p), chains[i].name))
		}
		if a.vips {
			chains[i].jumps = append(chains[i].jumps, b.vipJumps(chains[i].name)...)
		}
	}
	return chains
}

// hopsMatch returns the match of a TTL or hop limit, without its value.
func (b builder) hopsMatch() string {
	if b.family == family.IPv4 {
		return "-m ttl --ttl-eq"
	}
	return "-m hl --hl-eq"
}

// unleasedRules makes the rule that returns from a chain while no agent renews the lease.
func (b builder) unleasedRules() []string {
	if !b.cfg.Lease || b.cfg.NATOnly {
		return nil
	}
	return []string{b.rule(recent(b.family, "! "+leaseAlive), "no agent", "RETURN")}
}

// owners makes the rules that let queries of the agent and of excluded users pass through. The rules for the agent
// are first, because most queries that are not captured are the agent's. If accept is true, queries of the agent to
// other hosts also skip the rules of other programs in this table.
func (b builder) owners(accept bool) []string {
	var rules []string
	if accept {
		for _, agent := range b.agents() {
			rules = append(rules, b.rule("! -o lo "+agent, "queries of the agent to other hosts", "ACCEPT"))
		}
	}
	for _, agent := range b.agents() {
		rules = append(rules, b.rule(agent, "queries of the agent", "RETURN"))
	}
	for _, user := range ownerMatches("uid", b.cfg.ExcludeUIDs) {
		rules = append(rules, b.rule(user, "excluded user", "RETURN"))
	}
	for _, group := range ownerMatches("gid", b.cfg.ExcludeGIDs) {
		rules = append(rules, b.rule(group, "excluded group", "RETURN"))
	}
	return rules
}

// agents returns one match for each user and group of the agent.
func (b builder) agents() []string {
	return append(ownerMatches("uid", b.cfg.AgentUIDs), ownerMatches("gid", b.cfg.AgentGIDs)...)
}

// ownerMatches returns one match for the packets of each id. kind is "uid" for users or "gid" for groups.
func ownerMatches(kind string, ids []uint32) (matches []string) {
	for _, id := range ids {
		matches = append(matches, fmt.Sprintf("-m owner --%s-owner %d", kind, id))
	}
	return matches
}

// exclusions makes the rules that let packets to excluded destinations pass through. The chains for packets from
// this host and for packets from virtual interfaces both have these rules.
func (b builder) exclusions() []string {
	var rules []string
	if b.family == family.IPv6 && len(b.cfg.Servers) == 0 {
		rules = append(rules, b.rule("-d "+linkLocal, "link-local", "RETURN"))
	}
	for _, p := range b.cfg.ExcludeCIDRs {
		if p.Addr().Is4() != (b.family == family.IPv4) {
			continue
		}
		d := p.Masked().String()
		if p.Bits() == 0 {
			d = "" // iptables-save does not print a destination that means all
		}
		rules = append(rules, b.rule(matches("-d", d), "excluded destination", "RETURN"))
	}
	return rules
}

// linkLocal is the prefix of link-local IPv6 addresses. A socket that queries a link-local nameserver has a
// link-local address and is bound to its interface. If the packets of such a socket were redirected to ::1, the
// kernel would discard them.
const linkLocal = "fe80::/10"

// Passes reports whether queries to server pass through because no rule can capture them.
func Passes(server netip.Addr) bool { return server.Is6() && server.IsLinkLocalUnicast() }

// A destination has the values of -d and -o in the rule for captured queries.
type destination struct {
	address, outInterface string
}

// destinations returns the destinations whose queries are captured. A single empty destination means all.
func destinations(cfg Config, f family.Family) []destination {
	if len(cfg.Servers) == 0 {
		return []destination{{}}
	}
	var ds []destination
	for _, a := range cfg.Servers {
		if a.Is4() == (f == family.IPv4) && !Passes(a) {
			p := netip.PrefixFrom(a.WithZone(""), a.BitLen())
			ds = append(ds, destination{address: p.String(), outInterface: a.Zone()})
		}
	}
	return ds
}

// action is what the chains of one table do with queries that are not excluded.
type action struct {
	protocols       []string
	target, comment string
	vips            bool // connections to VIPs are redirected, too
}

// prerouting makes the chain for packets from virtual interfaces. These packets have no socket on this host and
// therefore no owner. They have no outgoing interface yet.
func (b builder) prerouting(a action) chain {
	c := chain{name: preroutingChain, parent: "PREROUTING", rules: append(b.unleasedRules(), b.exclusions()...)}
	for _, name := range b.cfg.VirtualInterfaces {
		if a.vips {
			c.rules = append(c.rules, b.vips(name)...)
		}
		for _, d := range b.destinations {
			for _, p := range a.protocols {
				c.rules = append(c.rules, b.rule(matches("-d", d.address, "-i", name, "-p", p), a.comment, a.target))
			}
		}
	}
	return c
}

// refusedPort is a UDP port on which no program listens (RFC 1078).
const refusedPort = 1

// vips makes the rules that redirect connections to VIPs, of those that come in through inInterface; if inInterface is
// "", of all. UDP packets are redirected to refusedPort, so the kernel refuses them at once.
func (b builder) vips(inInterface string) (rules []string) {
	for _, vip := range b.cfg.vipRanges(b.family) {
		for _, to := range []struct {
			protocol string
			port     uint16
		}{{"udp", refusedPort}, {"tcp", b.cfg.EgressPort}} {
			m := matches("-d", vip, "-i", inInterface, "-p", to.protocol)
			if len(b.cfg.Servers) == 0 { // then queries to VIPs are captured, too
				m += fmt.Sprintf(" -m %s ! --dport %d", to.protocol, dnsPort)
			}
			rules = append(rules, b.rule(m, "VIPs", fmt.Sprintf("REDIRECT --to-ports %d", to.port)))
		}
	}
	return rules
}

// vipJumps makes the rules that send packets to VIPs to a chain.
func (b builder) vipJumps(chain string) (jumps []string) {
	for _, vip := range b.cfg.vipRanges(b.family) {
		for _, p := range []string{"udp", "tcp"} {
			jumps = append(jumps, b.rule(matches("-d", vip, "-p", p), "VIPs over "+strings.ToUpper(p), chain))
		}
	}
	return jumps
}

// accepts makes the chains of table filter. They accept the packets of redirected flows, in both
// directions: a firewall that allows queries to a nameserver may know nothing of packets to the agent.
func (b builder) accepts() []chain {
	output := chain{name: outputChain, parent: "OUTPUT", jumps: []string{
		b.rule("-d "+b.loopback(), "to the agent", outputChain), b.rule("-s "+b.loopback(), "replies", outputChain)}}
	input := chain{name: inputChain, parent: "INPUT", jumps: []string{b.rule("-i lo", "to the agent, replies", inputChain)}}
	for _, name := range b.cfg.VirtualInterfaces {
		output.jumps = append(output.jumps, b.rule("-o "+name, "replies", outputChain))
		input.jumps = append(input.jumps, b.rule("-i "+name, "to the agent", inputChain))
	}
	for _, vip := range b.cfg.vipRanges(b.family) { // makes sendmsg(2) fail: an ICMP error alone reaches connected sockets only
		m := fmt.Sprintf("-p udp -m conntrack --ctstate DNAT --ctorigdst %s --ctreplsrcport %d", vip, refusedPort)
		icmp := map[family.Family]string{family.IPv4: "icmp", family.IPv6: "icmp6"}[b.family]
		output.rules = append(output.rules, b.rule(m, "UDP to VIPs", "REJECT --reject-with "+icmp+"-port-unreachable"))
	}
	output.rules, input.rules = append(output.rules, b.acceptRedirected()...), b.acceptRedirected()
	return []chain{input, output}
}

// loopback returns the loopback address as a prefix.
func (b builder) loopback() string {
	return netip.PrefixFrom(b.family.Loopback(), b.family.Loopback().BitLen()).String()
}

// acceptRedirected makes the rules that accept the packets of redirected flows, in both directions.
func (b builder) acceptRedirected() (rules []string) {
	accept := func(destination string, port uint16) {
		m := fmt.Sprintf("-m conntrack --ctstate DNAT %s --ctreplsrcport %d", destination, port)
		rules = append(rules, b.rule(m, "redirected", "ACCEPT"))
	}
	accept(fmt.Sprintf("--ctorigdstport %d", dnsPort), b.cfg.Port)
	for _, vip := range b.cfg.vipRanges(b.family) {
		accept("--ctorigdst "+vip, b.cfg.EgressPort)
		accept("--ctorigdst "+vip, refusedPort)
	}
	if len(b.audited()) > 0 {
		rules = append(rules, b.rule(fmt.Sprintf("-p tcp -m conntrack --ctstate DNAT --ctreplsrcport %d", b.cfg.EgressPort), "redirected", "ACCEPT"))
	}
	return rules
}

// addLooped adds rules to table raw that accept the packets of redirected flows when they come in on lo. Table raw
// comes before connection tracking, but these packets were assigned to their connections when they were sent. A reply
// on lo already has the source address of the nameserver, so rules against forged addresses, such as wg-quick's, would
// drop it.
func (b builder) addLooped(chains []chain) []chain {
	if len(b.cfg.VirtualInterfaces) == 0 {
		chains = append(chains, chain{name: preroutingChain, parent: "PREROUTING"})
	}
	c := &chains[len(chains)-1]
	c.jumps = append(c.jumps, b.rule("-i lo", "to the agent, replies", c.name))
	c.rules = append(b.acceptRedirected(), c.rules...)
	return chains
}

// addReplies adds rules that accept replies of the agent before all other rules of the table. Istio's rules for port
// 53 would put these replies into a zone of their own, where the kernel does not find the query.
func (b builder) addReplies(chains []chain) []chain {
	port := fmt.Sprintf("-p udp -m udp --sport %d", b.cfg.Port)
	output := &chains[0]
	var rules []string
	for _, agent := range b.agents() {
		rules = append(rules, b.rule(port+" "+agent, "replies of the agent", "ACCEPT"))
	}
	rules = append(rules, b.rule(fmt.Sprintf("%s ! --dport %d", port, dnsPort), "not DNS", "RETURN"))
	output.rules = append(rules, output.rules...)
	output.jumps = append(output.jumps, b.rule(port, "replies", output.name))
	return chains
}

// leases makes the chain that carries out requests about the lease.
func (b builder) leases() []chain {
	if !b.cfg.Lease {
		return nil
	}
	to := func(request leaseRequest) string { return fmt.Sprintf("-p udp -m udp --dport %d", request) }
	// A reply of the agent is no request, even if it goes to the port of a request: a sysctl can allow any user to
	// query the agent from such a low port.
	jump := fmt.Sprintf("-d %s -p udp -m udp ! --sport %d --dport %d:%d", b.loopback(), b.cfg.Port, leaseRenewal, leaseEnd)
	c := chain{name: leaseChain, parent: "OUTPUT", jumps: []string{b.rule(jump, "lease", leaseChain)}}
	for _, agent := range b.agents() {
		c.rules = append(c.rules,
			b.rule(to(leaseRenewal)+" "+agent+" "+recent(b.family, "--set"), "renewal", "DROP"),
			b.rule(to(leaseEnd)+" "+agent+" "+recent(b.family, "--remove"), "end", "DROP"))
	}
	c.rules = append(c.rules, b.rule(to(leaseQuery)+" "+recent(b.family, leaseAlive), "query", "DROP"))
	return []chain{c}
}

// synOnly matches the packet that opens a connection. If a connection is already open when conntrack first sees it, a
// redirect would break it.
const synOnly = "--tcp-flags FIN,SYN,RST,ACK SYN"

// matches joins options and their values, and leaves out options whose value is "". The caller passes the options
// in the order in which iptables-save prints them: -d, -i, -o, -p.
func matches(optionsAndValues ...string) string {
	var b strings.Builder
	for i := 0; i < len(optionsAndValues); i += 2 {
		if value := optionsAndValues[i+1]; value != "" {
			b.WriteString(" " + optionsAndValues[i] + " " + value)
		}
	}
	return strings.TrimPrefix(b.String(), " ")
}

// rule returns a rule as iptables-save prints it. The comment has a colon and a space, so iptables-save prints it
// in quotes.
func (b builder) rule(matches, comment, target string) string {
	rule := "-j " + target
	if !b.cfg.NATOnly {
		rule = `-m comment --comment "nametap: ` + comment + `" ` + rule
	}
	if matches != "" {
		rule = matches + " " + rule
	}
	return rule
}
