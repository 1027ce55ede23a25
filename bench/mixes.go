package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// A mix is one kind of query, with a query for every host.
type mix struct {
	// name is also that of the file with the queries.
	name, what string
	// wildcards selects the wildcards instead of the Services.
	wildcards bool
	// question returns the name, without a trailing dot, and the type of the query for a
	// host.
	question func(host) (name string, qtype uint16)
	// check returns an error if the answer for a host is wrong.
	check func(host, *dns.Msg) error
}

// directMix names the mix that all servers are compared with.
const directMix = "direct"

// mixes are the kinds of query, the one for the comparison first.
func mixes() []mix {
	return []mix{
		{
			name: directMix, what: "A of the full name",
			question: func(h host) (string, uint16) { return h.name, dns.TypeA },
			check:    hasAddresses,
		},
		{
			name: "short", what: "A of NAME.NAMESPACE",
			question: func(h host) (string, uint16) { return h.shortname + "." + h.namespace, dns.TypeA },
			check:    hasAddresses,
		},
		{
			name: "autopath", what: "A of the full name with a search domain",
			question: func(h host) (string, uint16) { return h.name + "." + ownDomain, dns.TypeA },
			check: func(h host, reply *dns.Msg) error {
				return errors.Join(hasAlias(h, reply), hasAddresses(h, reply))
			},
		},
		{
			name: "wildcard", what: "A of a name below a wildcard", wildcards: true,
			question: func(h host) (string, uint16) { return "some." + h.name, dns.TypeA },
			check:    hasAddresses,
		},
		{
			name: "nodata", what: "AAAA of a host that has none",
			question: func(h host) (string, uint16) { return h.name, dns.TypeAAAA },
			check: func(_ host, reply *dns.Msg) error {
				if len(reply.Answer) != 0 {
					return fmt.Errorf("%d records, want none", len(reply.Answer))
				}
				return nil
			},
		},
		{
			name: "ptr", what: "PTR of an address",
			question: func(h host) (string, uint16) { return reverse(h.ips[0]), dns.TypePTR },
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
func (m mix) queries(services, wildcards []host) []byte {
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
func hasAddresses(h host, reply *dns.Msg) error {
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
func hasAlias(h host, reply *dns.Msg) error {
	if len(reply.Answer) > 0 {
		if alias, ok := reply.Answer[0].(*dns.CNAME); ok && strings.EqualFold(alias.Target, h.name+".") {
			return nil
		}
	}
	return fmt.Errorf("no CNAME to %q in front", h.name)
}

// hasPointer checks that the answer has a PTR to h.
func hasPointer(h host, reply *dns.Msg) error {
	for _, record := range reply.Answer {
		if ptr, ok := record.(*dns.PTR); ok && strings.EqualFold(ptr.Ptr, h.name+".") {
			return nil
		}
	}
	return fmt.Errorf("no PTR to %q among %d records", h.name, len(reply.Answer))
}
