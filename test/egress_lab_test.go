package test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// egressPort is where agents listen for connections to VIPs. Their status port has the default.
const egressPort = "15055"

// An egressVM is a vm with servers for TCP behind eth0, which external hosts of the mesh lead to.
type egressVM struct {
	*vm

	mu     sync.Mutex
	zone   map[string][]string // addresses by name
	silent bool                // the nameserver does not answer
}

// The external hosts of an egressVM.
const (
	exactA    = "mysql-1.example.com"
	exactB    = "mysql-2.example.com"
	wildcard  = "*.apps.example.org"
	vipA      = "240.240.0.1"
	vipB      = "240.240.0.2"
	vipWild   = "240.240.0.3"
	vip6A     = "2001:2::1"
	vip6B     = "2001:2::2"
	vip6Wild  = "2001:2::3"
	serverA   = "10.0.0.11"
	serverB   = "10.0.0.12"
	server6A  = "fd00::11"
	server6B  = "fd00::12"
	unusedVIP = "240.240.9.9"
)

// newEgressVM makes an egressVM whose nameserver has a zone.
func newEgressVM(tb testing.TB, backend string) *egressVM {
	tb.Helper()
	e := &egressVM{vm: newVM(tb, backend)}
	for _, addr := range []string{serverA + "/24", serverB + "/24", server6A + "/64", server6B + "/64"} {
		e.net.Exec("ip", "address", "add", addr, "dev", "eth0", "nodad")
	}
	e.Exec("ip", "route", "add", "default", "via", named)
	e.Exec("ip", "-6", "route", "add", "default", "via", named6)
	e.zone = map[string][]string{
		exactA: {serverA, server6A}, exactB: {serverB, server6B},
		"a.apps.example.org": {serverA, server6A}, "b.apps.example.org": {serverB, server6B},
	}
	for _, addr := range []string{"10.0.0.55", "fd00::55"} {
		bits := "/24"
		if strings.Contains(addr, ":") {
			bits = "/64"
		}
		e.net.Exec("ip", "address", "add", addr+bits, "dev", "eth0", "nodad")
		e.net.Run(func() {
			fakedns.Start(tb, e.answer, fakedns.On(netip.AddrPortFrom(netip.MustParseAddr(addr), 53)))
		})
	}
	e.resolvConf = e.write("resolv.conf", "nameserver 10.0.0.55\n")
	e.flags = append(e.flags, "--egress", "--egress-addr", "localhost:"+egressPort)
	e.push(map[string][]string{exactA: {vipA, vip6A}, exactB: {vipB, vip6B}, wildcard: {vipWild, vip6Wild}})
	return e
}

// push pushes external hosts with their VIPs.
func (e *egressVM) push(hosts map[string][]string) {
	e.tb.Helper()
	table := &api.NameTable{Table: map[string]*api.NameTable_NameInfo{}}
	for host, ips := range hosts {
		table.Table[host] = externalHost(nil, ips...)
	}
	e.xds.Push(table)
}

// externalHost returns the entry of a host with VIPs and destinations.
func externalHost(destinations []*api.NameTable_Destination, vips ...string) *api.NameTable_NameInfo {
	return &api.NameTable_NameInfo{Ips: vips, Registry: "External", Destinations: destinations}
}

// resolve sets the addresses of a name.
func (e *egressVM) resolve(name string, addrs ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.zone[name] = addrs
}

// silence lets the nameserver answer no more.
func (e *egressVM) silence() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.silent = true
}

// answer answers from the zone.
func (e *egressVM) answer(query *dns.Msg, _ string) *dns.Msg {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.silent {
		return nil
	}
	reply, question := new(dns.Msg).SetReply(query), query.Question[0]
	reply.RecursionAvailable = true
	addrs, found := e.zone[strings.TrimSuffix(strings.ToLower(question.Name), ".")]
	if !found {
		reply.Rcode = dns.RcodeNameError
	}
	for _, addr := range addrs {
		header := dns.RR_Header{Name: question.Name, Rrtype: question.Qtype, Class: dns.ClassINET, Ttl: 1}
		ip := netip.MustParseAddr(addr)
		switch {
		case ip.Is4() && question.Qtype == dns.TypeA:
			reply.Answer = append(reply.Answer, &dns.A{Hdr: header, A: ip.AsSlice()})
		case ip.Is6() && question.Qtype == dns.TypeAAAA:
			reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: header, AAAA: ip.AsSlice()})
		}
	}
	return reply
}

// greeter returns a handler that greets at once, and then echoes.
func greeter(name string) func(conn *net.TCPConn) {
	return func(conn *net.TCPConn) {
		if _, err := fmt.Fprintf(conn, "220 %s\n", name); err != nil {
			return
		}
		_, _ = io.Copy(conn, conn) // until the client ends its data
	}
}

// dialTCP connects from the vm.
func (e *egressVM) dialTCP(host, port string) (*net.TCPConn, error) {
	var conn net.Conn
	var err error
	e.Run(func() { conn, err = net.DialTimeout("tcp", net.JoinHostPort(host, port), patience) })
	if err != nil {
		return nil, err
	}
	e.tb.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(4 * patience)) // which is longer than any test
	return conn.(*net.TCPConn), nil
}

// mustDial is dialTCP for a connection that has to be accepted.
func (e *egressVM) mustDial(host, port string) *net.TCPConn {
	e.tb.Helper()
	conn, err := e.dialTCP(host, port)
	if err != nil {
		e.tb.Fatal(err)
	}
	return conn
}

// greeting returns the first line that a server sends, or the error.
func (e *egressVM) greeting(host, port string) string {
	conn, err := e.dialTCP(host, port)
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(line)
}
