package lab

import (
	"net"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// The addresses of the network.
const (
	Self    = "10.0.0.1"       // of the machine
	Self6   = "fd00::1"        // of the machine
	Named   = "10.0.0.53"      // of the nameserver in the machine's resolv.conf
	Named6  = "fd00::53"       // of the same nameserver
	Other   = "10.0.0.54"      // of a nameserver that resolv.conf does not name
	Other6  = "fd00::54"       // of the same nameserver
	Control = "10.0.0.2:15010" // of the control plane, without TLS
)

// What the table and the nameservers answer.
const (
	Mesh    = "web.shop.svc.cluster.local"
	MeshIP  = "10.1.0.1"   // of the mesh name, in the table
	NamedIP = "192.0.2.53" // of every name, from the nameserver in resolv.conf
	OtherIP = "192.0.2.54" // of every name, from the other nameserver
)

// A World is the network that a machine is connected to. It stays when the machine reboots.
// Servers that a test restarts must be restarted in the namespace, by Run.
type World struct {
	*netns.NS
	Control      *fakexds.Server
	Named, Other *fakedns.Server // over IPv4
}

// newWorld makes a world that is connected to the namespace of a machine. Its control plane
// has pushed [Mesh].
func newWorld(tb testing.TB, machine *netns.NS) *World {
	tb.Helper()
	w := &World{NS: netns.New(tb)}
	w.connect(machine)
	w.Run(func() {
		w.Control = fakexds.Start(tb, fakexds.Options{Addr: Control})
		w.Named, w.Other = nameserver(tb, Named, NamedIP), nameserver(tb, Other, OtherIP)
		nameserver(tb, Named6, NamedIP)
		nameserver(tb, Other6, OtherIP)
	})
	w.Control.Push(&api.NameTable{Table: map[string]*api.NameTable_NameInfo{
		Mesh: {Ips: []string{MeshIP}, Registry: "Kubernetes", Shortname: "web", Namespace: "shop"},
	}})
	return w
}

// link is the name of the world's interface, and nic of the machine's.
const (
	link = "vm0"
	nic  = "host0"
)

// connect connects the namespace of a machine.
func (w *World) connect(machine *netns.NS) {
	control := netip.MustParseAddrPort(Control).Addr().String()
	netns.Connect(
		netns.End{NS: machine, Name: nic, Addrs: []string{Self + "/24", Self6 + "/64"}},
		netns.End{NS: w.NS, Name: link, Addrs: []string{
			control + "/24", Named + "/24", Other + "/24", Named6 + "/64", Other6 + "/64",
		}},
	)
	machine.Exec("ip", "route", "add", "default", "via", control)
}

// disconnect disconnects the machine.
func (w *World) disconnect() { w.Exec("ip", "link", "delete", link) }

// nameserver starts a nameserver on port 53 of an address. It answers all names with one
// address.
func nameserver(tb testing.TB, addr, has string) *fakedns.Server {
	tb.Helper()
	return fakedns.Start(tb, anyName(has), fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(addr), 53)))
}

// anyName returns a handler that answers every name with one address, except names that a search list makes of those of
// the mesh (names below its domain, and what stands before such a domain or a wildcard's suffix: N4, N5), and PTR.
func anyName(address string) fakedns.Handler {
	ip := net.ParseIP(address)
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply, name := new(dns.Msg).SetReply(query), query.Question[0].Name
		switch {
		case query.Opcode != dns.OpcodeQuery:
		case dns.IsSubDomain("corp.example.", name), dns.IsSubDomain("b.", name), dns.IsSubDomain("arpa.", name):
			reply.RecursionAvailable, reply.Rcode = true, dns.RcodeNameError
		case query.Question[0].Qtype == dns.TypeA:
			header := dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}
			reply.RecursionAvailable, reply.Answer = true, []dns.RR{&dns.A{Hdr: header, A: ip}}
		}
		return reply
	}
}
