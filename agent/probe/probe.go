// Package probe asks DNS servers who they are: it finds out whether a query reaches an agent. A [Query] says to which
// server, over which network and as whom it is sent; a [Result] says what has answered, or why nothing has.
package probe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/iptables"
)

const (
	// Timeout is how long a server has to answer.
	Timeout = time.Second
	// Repeat is the time after which a query over UDP without an answer is sent again: the kernel drops queries while the
	// buffer of a listener is full.
	Repeat = Timeout / 10
	// Nobody is the user "nobody" and its group: any program.
	Nobody = 65534
)

// name is the name whose TXT record, in class CHAOS, says which agent answers: by its version and its ID. No other server
// has this record, whatever its identity (RFC 4892) is. An agent answers without a table and without a nameserver.
const name = "agent.nametap."

// A Query asks a server who it is.
type Query struct {
	Network, To string        // udp or tcp, and the server's host:port
	ID          string        // the ID of the wanted agent; "": any agent
	Hops        int           // the TTL or hop limit of the packets; 0: the system's default
	As          int           // the user and the group that the socket belongs to, for which this process must be root; 0: its own
	Limit       time.Duration // how long the answer may take; 0: Timeout
}

// A Result is what came of a query.
type Result struct {
	Network string `json:"network"`
	To      string `json:"to"`
	State   State  `json:"state"`
	Error   string `json:"error,omitempty"` // why the state is not Agent
	ID      string `json:"-"`               // the ID of the agent that has answered
}

// A State says what a result shows.
type State string

// The states.
const (
	Agent  State = "an agent answers" // the wanted one
	Other  State = "another server answers"
	Silent State = "no server answers"
	Closed State = "no program listens for"
	Barred State = "a firewall of this host drops"
	Unsent State = "this host cannot send" // the process has no descriptor, or no port is free
	Absent State = "this host has no address for"
)

// Answered reports whether any server has answered.
func (r Result) Answered() bool { return r.State == Agent || r.State == Other }

// Sent reports whether the query has left. If not, the result says nothing about the server.
func (r Result) Sent() bool { return r.State != Barred && r.State != Unsent && r.State != Absent }

// Family returns the family of the server.
func (r Result) Family() family.Family { return family.Of(netip.MustParseAddrPort(r.To).Addr()) }

// Err returns an error with the server and the reason, nil if the wanted agent has answered.
func (r Result) Err() error {
	if r.State == Agent {
		return nil
	}
	return fmt.Errorf("%s %s: %s", r.Network, r.To, r.Error)
}

// Errors returns the texts of the errors of results.
func Errors(results []Result) (texts []string) {
	for _, r := range results {
		if err := r.Err(); err != nil {
			texts = append(texts, err.Error())
		}
	}
	return texts
}

// All sends all queries at the same time, and returns the results in the same order.
func All(ctx context.Context, queries ...Query) []Result {
	found := make([]Result, len(queries))
	var asking sync.WaitGroup
	for i, q := range queries {
		asking.Go(func() { found[i] = q.Ask(ctx) })
	}
	asking.Wait()
	return found
}

// Listeners queries the listeners of an agent.
func Listeners(ctx context.Context, listeners ...dnsproxy.Addr) []Result {
	queries := make([]Query, 0, len(listeners))
	for _, l := range listeners {
		to, _ := listen.Reachable(l.Address) // fails for no address of a listener
		queries = append(queries, Query{Network: l.Network, To: to})
	}
	return All(ctx, queries...)
}

// At returns the listeners at a port to which rules of these families redirect: for each family over UDP, then over TCP.
func At(port uint16, families ...family.Family) (listeners []dnsproxy.Addr) {
	for _, f := range families {
		at := netip.AddrPortFrom(f.Loopback(), port).String()
		listeners = append(listeners, dnsproxy.Addr{Network: "udp", Address: at}, dnsproxy.Addr{Network: "tcp", Address: at})
	}
	return listeners
}

// Redirections sends a query over each of the families to [iptables.TestAddr], from where the rules of nametap redirect
// it to the agent. It needs no capability, so it works in the agent's container of a pod.
func Redirections(ctx context.Context, families []family.Family) []Result {
	queries := make([]Query, 0, len(families))
	for _, f := range families {
		q := Query{Network: "udp", To: netip.AddrPortFrom(iptables.TestAddr(f), 53).String(), Limit: Timeout / 2}
		if f == family.IPv6 {
			q.Hops = 1 // if the query is not redirected, the first router discards it
		}
		queries = append(queries, q)
	}
	return All(ctx, queries...)
}

// Ask sends the query. It sends it again every [Repeat] over UDP until there is an answer.
func (q Query) Ask(ctx context.Context) Result {
	found := Result{Network: q.Network, To: q.To}
	var text string
	var err error
	ask := func() error { text, err = q.exchange(ctx); return err }
	if q.As == 0 || q.As == os.Geteuid() {
		_ = ask()
	} else {
		err = listen.AsUser(q.As, q.As, ask)
	}
	switch id := text[strings.LastIndexByte(text, ' ')+1:]; {
	case err != nil:
		found.State, found.Error = q.stateOf(err), reason(err)
	case !strings.HasPrefix(text, "nametap "):
		found.State, found.Error = Other, "another DNS server answers"
	case q.ID != "" && q.ID != id:
		found.State, found.Error = Other, "the agent "+id+" answers"
	default:
		found.State, found.ID = Agent, id
	}
	return found
}

// exchange returns the text of the answer, "" if the answer is not exactly one TXT record.
func (q Query) exchange(ctx context.Context) (string, error) {
	limit, began := cmp.Or(q.Limit, Timeout), time.Now()
	dialer := net.Dialer{Timeout: limit}
	if q.Hops != 0 {
		dialer.Control = SetHops(q.Hops)
	}
	conn, err := dialer.DialContext(ctx, q.Network, q.To)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	client := dns.Client{Net: q.Network, Timeout: limit}
	if q.Network == "udp" {
		client.Timeout = Repeat
	}
	query := new(dns.Msg).SetQuestion(name, dns.TypeTXT)
	query.Question[0].Qclass = dns.ClassCHAOS
	for {
		reply, _, err := client.ExchangeWithConnContext(ctx, query, &dns.Conn{Conn: conn})
		switch {
		case err == nil && len(reply.Answer) == 1 && reply.Answer[0].Header().Rrtype == dns.TypeTXT:
			return strings.Join(reply.Answer[0].(*dns.TXT).Txt, ""), nil
		case err == nil:
			return "", nil
		case !errors.Is(err, os.ErrDeadlineExceeded) || ctx.Err() != nil || time.Since(began) >= limit:
			return "", err
		}
	}
}

// stateOf returns the state that an error shows. A firewall that rejects packets causes the same error codes as a missing
// route, but not where a UDP socket is connected, for which no packet is sent.
func (q Query) stateOf(err error) State {
	op := new(net.OpError)
	dialled := !errors.As(err, &op) || op.Op != "dial"
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		return Closed
	case errors.Is(err, unix.EPERM):
		return Barred
	case dialled:
		return Silent
	case q.unroutable():
		return Absent
	case q.Network == "udp", listen.OutOfDescriptors(err), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAGAIN):
		return Unsent
	}
	return Silent
}

// unroutable reports whether this host has no route to the server, or no address of its family.
func (q Query) unroutable() bool {
	conn, err := net.Dial("udp", q.To) //nolint:noctx // sends nothing
	if err == nil {
		_ = conn.Close()
	}
	return listen.NoRoute(err)
}

// reason returns the text of an error without the addresses.
func reason(err error) string {
	if op := new(net.OpError); errors.As(err, &op) {
		err = op.Err
	}
	return err.Error()
}

// SetHops returns a control function that gives the packets of a socket a TTL or hop limit.
func SetHops(hops int) func(network, address string, conn syscall.RawConn) error {
	return func(network, _ string, conn syscall.RawConn) error {
		level, option := unix.IPPROTO_IP, unix.IP_TTL
		if strings.HasSuffix(network, "6") {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
		}
		var err error
		controlErr := conn.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, hops) })
		return errors.Join(controlErr, err)
	}
}
