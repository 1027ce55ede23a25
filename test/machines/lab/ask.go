package lab

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// answerLimit is longer than a resolver's own timeout, 5 s.
const answerLimit = 10 * time.Second

// A Client is a socket for queries to one server.
type Client struct{ *dns.Conn }

// Connect opens a socket for queries to a server that the place reaches.
func (p *Place) Connect(server string) Client {
	p.TB.Helper()
	conn, err := p.Dial(context.WithoutCancel(p.TB.Context()), "udp", server)
	if err != nil {
		p.TB.Fatal(err)
	}
	return Client{&dns.Conn{Conn: conn}}
}

// Ask sends a query to a server from a socket of its own. See [Client.Ask].
func (p *Place) Ask(server, name, qtype string) string {
	p.TB.Helper()
	c := p.Connect(server)
	defer c.Close()
	return c.Ask(name, qtype)
}

// Exchange sends a query, and returns the response.
func (c Client) Exchange(name, qtype string) (*dns.Msg, error) {
	client := dns.Client{Timeout: answerLimit}
	reply, _, err := client.ExchangeWithConn(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.StringToType[qtype]), c.Conn)
	return reply, err
}

// Ask sends a query, and returns the sorted addresses, names and PORT:HOSTs in the answer, or NODATA, or the response
// code, or "no answer": a server may be absent for a time.
func (c Client) Ask(name, qtype string) string {
	reply, err := c.Exchange(name, qtype)
	if err != nil {
		return "no answer"
	}
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
