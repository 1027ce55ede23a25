package lab

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"google.golang.org/protobuf/encoding/protowire"
)

// The agent's namespace, and the cluster domain.
const (
	clusterDomain = "cluster.local"
	namespace     = "ns-07"
	namespaces    = 50
	ownDomain     = namespace + ".svc." + clusterDomain
)

// searchList is the search list of a pod in the namespace.
func searchList() []string {
	return []string{ownDomain, "svc." + clusterDomain, clusterDomain}
}

// A Host is one entry of the table of every server.
type Host struct {
	// Name has no trailing dot. For a wildcard it is the part after "*.".
	Name string
	// shortname and namespace are empty for a wildcard.
	shortname, namespace string
	wildcard             bool
	// ips is one IPv4 address, or three for every tenth host.
	ips []netip.Addr
}

// makeHosts makes n Services of a cluster, and one external wildcard for every hundred. The
// same n makes the same hosts. Only the agent and Istio's agent get the wildcards, because
// not every peer supports them.
func makeHosts(n int) (services, wildcards []Host) {
	for i := range n {
		h := Host{
			shortname: fmt.Sprintf("svc-%06d", i),
			namespace: fmt.Sprintf("ns-%02d", i%namespaces),
			ips:       []netip.Addr{Address(10, 4*i+1)},
		}
		h.Name = h.shortname + "." + h.namespace + ".svc." + clusterDomain
		if i%10 == 0 {
			h.ips = append(h.ips, Address(10, 4*i+2), Address(10, 4*i+3))
		}
		services = append(services, h)
	}
	for i := range (n + 99) / 100 {
		wildcards = append(wildcards, Host{
			Name:     fmt.Sprintf("wild-%06d.example.com", i),
			wildcard: true,
			ips:      []netip.Addr{Address(240, 240<<16|i+1)},
		})
	}
	return services, wildcards
}

// Address returns the n-th address of the network net.0.0.0/8.
func Address(net byte, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{net, byte(n >> 16), byte(n >> 8), byte(n)})
}

// Moved returns a copy of hosts in which the first n have other addresses.
func Moved(hosts []Host, n int) []Host {
	changed := append([]Host(nil), hosts...)
	for i := range changed[:n] {
		ips := make([]netip.Addr, len(changed[i].ips))
		for k, ip := range changed[i].ips {
			b := ip.As4()
			b[0]++
			ips[k] = netip.AddrFrom4(b)
		}
		changed[i].ips = ips
	}
	return changed
}

// NameTable returns the wire form of an istio.networking.nds.v1.NameTable with hosts. It
// does not use nametap's packages: this module must not depend on what it measures.
func NameTable(hosts ...[]Host) []byte {
	var table []byte
	for _, some := range hosts {
		for _, h := range some {
			table = protowire.AppendTag(table, 1, protowire.BytesType)
			table = protowire.AppendBytes(table, tableEntry(h))
		}
	}
	return table
}

// tableEntry returns one entry of the map: the name and a NameInfo.
func tableEntry(h Host) []byte {
	text := func(b []byte, field protowire.Number, s string) []byte {
		if s == "" {
			return b
		}
		return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
	}
	name, registry := h.Name, "Kubernetes"
	if h.wildcard {
		name, registry = "*."+h.Name, "External"
	}
	var info []byte
	for _, ip := range h.ips {
		info = text(info, 1, ip.String())
	}
	info = text(info, 2, registry)
	info = text(info, 3, h.shortname)
	info = text(info, 4, h.namespace)

	entry := text(nil, 1, name)
	return protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), info)
}

// shuffled returns hosts in an order that looks random, but is the same each time.
func shuffled(hosts []Host) []Host {
	order := append([]Host(nil), hosts...)
	random := rand.New(rand.NewPCG(1, 2)) // the order must be the same each time
	random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// probeName is a name outside of the mesh; queries for it check whether a server is ready.
const probeName = "probe.example.org."

// Distinct returns the i-th name of a series outside of the mesh, without a trailing dot.
func Distinct(series string, i int) string { return fmt.Sprintf("q%06d.%s.example.org", i, series) }
