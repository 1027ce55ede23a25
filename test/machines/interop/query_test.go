package interop

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// ask sends a query to a server of the machine, and returns the sorted addresses, names and
// PORT:HOSTs in the answer, or NODATA, or the response code.
func (m *machine) ask(server, name, qtype string) string {
	m.tb.Helper()
	conn := m.connect(server)
	defer conn.Close()
	return conn.ask(name, qtype)
}

// A client is a socket for queries to one server.
type client struct {
	*dns.Conn
	m *machine
}

// connect opens a socket for queries to a server of the machine.
func (m *machine) connect(server string) client {
	m.tb.Helper()
	var conn net.Conn
	var err error
	m.Run(func() { conn, err = net.DialTimeout("udp", server, wait.Limit) })
	if err != nil {
		m.tb.Fatal(err)
	}
	return client{&dns.Conn{Conn: conn}, m}
}

// ask is like the method of machine.
func (c client) ask(name, qtype string) string {
	c.m.tb.Helper()
	client := dns.Client{Timeout: 10 * time.Second}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.StringToType[qtype]), c.Conn)
	if err != nil {
		return "no answer" // a server may be absent for a time
	}
	return result(reply)
}

func result(reply *dns.Msg) string {
	var data []string
	for _, rr := range reply.Answer {
		switch rr := rr.(type) {
		case *dns.A:
			data = append(data, rr.A.String())
		case *dns.AAAA:
			data = append(data, rr.AAAA.String())
		case *dns.PTR:
			data = append(data, rr.Ptr)
		case *dns.SRV:
			data = append(data, fmt.Sprintf("%d:%s", rr.Port, rr.Target))
		}
	}
	slices.Sort(data)
	switch {
	case len(data) > 0:
		return strings.Join(data, " ")
	case reply.Rcode != dns.RcodeSuccess:
		return dns.RcodeToString[reply.Rcode]
	}
	return "NODATA"
}

// candidates returns the names that a resolver tries for a name, in its order.
func candidates(name string, search []string) []string {
	if strings.HasSuffix(name, ".") {
		return []string{name}
	}
	var all []string
	for _, domain := range search {
		all = append(all, name+"."+domain)
	}
	if strings.Count(name, ".") >= ndots {
		return slices.Insert(all, 0, name)
	}
	return append(all, name)
}

// find returns the data of the last record of a type that a program gets which searches as glibc's res_search: the
// first response with an answer ends it.
func (c client) find(name, qtype string, search []string) string {
	c.m.tb.Helper()
	client := dns.Client{Timeout: 10 * time.Second}
	for _, candidate := range candidates(name, search) {
		reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(candidate), dns.StringToType[qtype]), c.Conn)
		if err != nil {
			return err.Error()
		}
		if n := len(reply.Answer); reply.Rcode == dns.RcodeSuccess && n > 0 {
			last := reply.Answer[n-1]
			if last.Header().Rrtype != dns.StringToType[qtype] {
				return "no record of the type"
			}
			return strings.TrimPrefix(last.String(), last.Header().String())
		}
	}
	return "not found"
}

// lookup resolves a name as glibc does with the machine's resolv.conf: it returns the addresses
// of the first name of the search list that has any.
func (c client) lookup(name string, search []string) string {
	c.m.tb.Helper()
	for _, candidate := range candidates(name, search) {
		var found []string
		for _, qtype := range []string{"A", "AAAA"} {
			if addrs := c.ask(candidate, qtype); strings.ContainsAny(addrs, ".:") {
				found = append(found, addrs)
			}
		}
		if len(found) > 0 {
			return strings.Join(found, " ")
		}
	}
	return "not found"
}
