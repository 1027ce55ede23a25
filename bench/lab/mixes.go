package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// A Mix is one kind of query, with a query for every host.
type Mix struct {
	// Name is also the name of the file with the queries.
	Name, What string
	// wildcards selects the wildcards instead of the Services.
	wildcards bool
	// question returns the name, without a trailing dot, and the type of the query for a
	// host.
	question func(Host) (name string, qtype uint16)
	// check returns an error if the answer for a host is wrong.
	check func(Host, *dns.Msg) error
}

// DirectMix names the mix that all servers are compared with.
const DirectMix = "direct"

// Mixes are the kinds of query, the one for the comparison first.
func Mixes() []Mix {
	return []Mix{
		{
			Name: DirectMix, What: "A of the full name",
			question: func(h Host) (string, uint16) { return h.Name, dns.TypeA },
			check:    hasAddresses,
		},
		{
			Name: "short", What: "A of NAME.NAMESPACE",
			question: func(h Host) (string, uint16) { return h.shortname + "." + h.namespace, dns.TypeA },
			check:    hasAddresses,
		},
		{
			Name: "autopath", What: "A of the full name with a search domain",
			question: func(h Host) (string, uint16) { return h.Name + "." + ownDomain, dns.TypeA },
			check: func(h Host, reply *dns.Msg) error {
				return errors.Join(hasAlias(h, reply), hasAddresses(h, reply))
			},
		},
		{
			Name: "wildcard", What: "A of a name below a wildcard", wildcards: true,
			question: func(h Host) (string, uint16) { return "some." + h.Name, dns.TypeA },
			check:    hasAddresses,
		},
		{
			Name: "nodata", What: "AAAA of a host that has none",
			question: func(h Host) (string, uint16) { return h.Name, dns.TypeAAAA },
			check: func(_ Host, reply *dns.Msg) error {
				if len(reply.Answer) != 0 {
					return fmt.Errorf("%d records, want none", len(reply.Answer))
				}
				return nil
			},
		},
		{
			Name: "ptr", What: "PTR of an address",
			question: func(h Host) (string, uint16) { return reverse(h.ips[0]), dns.TypePTR },
			check:    hasPointer,
		},
	}
}

// reverse returns the name below in-addr.arpa of an IPv4 address.
func reverse(ip netip.Addr) string {
	b := ip.As4()
	return fmt.Sprintf("%d.%d.%d.%d.in-addr.arpa", b[3], b[2], b[1], b[0])
}

// queries returns the input of dnsperf: one line for each host, in a fixed random order.
func (m Mix) queries(services, wildcards []Host) []byte {
	hosts := services
	if m.wildcards {
		hosts = wildcards
	}
	var file []byte
	for _, h := range shuffled(hosts) {
		name, qtype := m.question(h)
		file = fmt.Appendf(file, "%s %s\n", name, dns.TypeToString[qtype])
	}
	return file
}

// hasAddresses checks that the answer has exactly the addresses of h.
func hasAddresses(h Host, reply *dns.Msg) error {
	var got []netip.Addr
	for _, record := range reply.Answer {
		if a, ok := record.(*dns.A); ok {
			ip, _ := netip.AddrFromSlice(a.A.To4())
			got = append(got, ip)
		}
	}
	want := slices.SortedFunc(slices.Values(h.ips), netip.Addr.Compare)
	slices.SortFunc(got, netip.Addr.Compare)
	if !slices.Equal(got, want) {
		return fmt.Errorf("addresses %v, want %v", got, want)
	}
	return nil
}

// hasAlias checks that the answer starts with a CNAME to h.
func hasAlias(h Host, reply *dns.Msg) error {
	if len(reply.Answer) > 0 {
		if alias, ok := reply.Answer[0].(*dns.CNAME); ok && strings.EqualFold(alias.Target, h.Name+".") {
			return nil
		}
	}
	return fmt.Errorf("no CNAME to %q in front", h.Name)
}

// hasPointer checks that the answer has a PTR to h.
func hasPointer(h Host, reply *dns.Msg) error {
	for _, record := range reply.Answer {
		if ptr, ok := record.(*dns.PTR); ok && strings.EqualFold(ptr.Ptr, h.Name+".") {
			return nil
		}
	}
	return fmt.Errorf("no PTR to %q among %d records", h.Name, len(reply.Answer))
}
