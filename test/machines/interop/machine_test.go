package interop

import (
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// A machine is a host for agents: a network namespace that reaches its cluster, with a
// nameserver on 127.0.0.1:53.
type machine struct {
	place
	c          *cluster
	control    string // the address of the cluster
	addrs      []string
	nameserver *fakedns.Server
}

// Which addresses a machine has.
type families int

const (
	dual families = iota
	onlyIPv4
	onlyIPv6
)

// machine makes a machine.
func (c *cluster) machine(f families) *machine {
	c.tb.Helper()
	c.machines++
	m := &machine{place: place{netns.New(c.tb), c.tb, c.path("machine-" + strconv.Itoa(c.machines))}, c: c}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		c.tb.Fatal(err)
	}
	near := netns.End{NS: c.NS, Name: "m" + strconv.Itoa(c.machines)}
	far := netns.End{NS: m.NS, Name: "eth0"}
	add := func(format string, bits int) {
		addr := fmt.Sprintf(format, c.machines, 2)
		m.addrs = append(m.addrs, addr)
		m.control = fmt.Sprintf(format, c.machines, 1)
		near.Addrs = append(near.Addrs, fmt.Sprintf("%s/%d", m.control, bits))
		far.Addrs = append(far.Addrs, fmt.Sprintf("%s/%d", addr, bits))
	}
	if f != onlyIPv4 {
		add("fd00:31:%d::%d", 64)
	}
	if f != onlyIPv6 {
		add("172.30.%d.%d", 24)
	}
	netns.Connect(near, far)
	m.Run(func() {
		m.nameserver = fakedns.Start(m.tb, upstream, fakedns.On(netip.MustParseAddrPort("127.0.0.1:53")))
	})
	return m
}

// upstreamAddr is what the nameserver answers.
const upstreamAddr = "192.0.2.53"

// upstream answers the names that the tests do not expect in the table, so that a forwarded
// query shows. For all other names it answers NXDOMAIN.
func upstream(query *dns.Msg, network string) *dns.Msg {
	first, _, _ := strings.Cut(strings.ToLower(query.Question[0].Name), ".")
	switch first {
	case "below", "absent", "empty", "external", "none", "network":
		if query.Question[0].Qtype != dns.TypeA {
			return new(dns.Msg).SetReply(query)
		}
		return fakedns.Answer(query.Question[0].Name+" 60 IN A "+upstreamAddr)(query, network)
	}
	return fakedns.Rcode(dns.RcodeNameError)(query, network)
}

// ndots is the option in resolv.conf.
const ndots = 5

// searchList returns the search list of a pod in a namespace.
func searchList(namespace string) []string {
	return []string{namespace + ".svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"}
}

// resolvConf writes the resolv.conf of a pod in a namespace, and returns its path.
func (m *machine) resolvConf(namespace string) string {
	m.tb.Helper()
	return m.write("resolv.conf-"+namespace, fmt.Sprintf("nameserver 127.0.0.1\nsearch %s\noptions ndots:%d\n",
		strings.Join(searchList(namespace), " "), ndots))
}
