package upstream

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/miekg/dns"
)

// maxTransfers is how many zone transfers may run at a time. Each has its own connection
// for as long as the client takes to read the transfer.
const maxTransfers = 16

// errTransfers is the error when too many zone transfers are running.
var errTransfers = errors.New("too many zone transfers are running")

// Transfer asks for a zone (AXFR, RFC 5936; IXFR, RFC 1995) over a connection of its own to
// the first server of the group that accepts a connection. It calls send with each message of the
// response except the last message, and returns the last one. Messages are as the server sent them. Each message
// must arrive within Config.Timeout. Transfer may fail after it has called send.
func (g *Group) Transfer(query []byte, send func(message []byte) error) (last Answer, err error) {
	c := g.client
	if c.transfers.Add(1) > maxTransfers {
		c.transfers.Add(-1)
		return Answer{}, errTransfers
	}
	defer c.transfers.Add(-1)
	end, err := newTransferEnd(query)
	if err != nil {
		return Answer{}, err
	}
	conn, server, err := g.dialAny()
	if err != nil {
		return Answer{}, err
	}
	defer conn.Close()
	last.Server = server.name
	if last.Reply, err = end.relay(conn, query, send, c.latest.Load().Timeout); err != nil {
		err = fmt.Errorf("%s: %w", server.name, cause(err))
	}
	return last, err
}

// dialAny connects to the first server that can be connected to.
func (g *Group) dialAny() (net.Conn, *server, error) {
	now := time.Now()
	servers := slices.Clone(g.servers)
	slices.SortStableFunc(servers,
		func(a, b *server) int { return int(a.standing(now).state) - int(b.standing(now).state) })
	err := ErrNoServers
	for _, s := range servers {
		if s.standing(now).state == Looping {
			err = fmt.Errorf("%s: %w", s.name, ErrLoop)
			continue
		}
		var conn net.Conn
		if conn, err = s.dial(); err == nil {
			return conn, s, nil
		}
		err = fmt.Errorf("%s: %w", s.name, cause(err))
	}
	return nil, nil, err
}

// A transferEnd finds the last message of a zone transfer. The records of a transfer begin and end with the zone's
// SOA record. If the transfer is incremental, the second record is the SOA record of an older version, and the
// zone's SOA record also stands before the additions of the last difference. So the zone's SOA record is sent three
// times.
type transferEnd struct {
	id           uint16
	incremental  bool   // the query is an IXFR
	clientSerial uint32 // the serial that the client has, if the query is an IXFR

	records  int    // how many were received so far
	serial   uint32 // the serial of the zone
	soaCount int    // how often the zone's SOA record was received so far
	soaTotal int    // how often the zone's SOA record is sent in the whole transfer
}

func newTransferEnd(query []byte) (*transferEnd, error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(query); err != nil || len(msg.Question) != 1 {
		return nil, errMalformedQuery
	}
	t := &transferEnd{id: msg.Id, incremental: msg.Question[0].Qtype == dns.TypeIXFR, soaTotal: 2}
	for _, rr := range msg.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			t.clientSerial = soa.Serial
		}
	}
	return t, nil
}

// relay sends the query and relays the messages of the response. It does not relay the last message, but returns it.
func (t *transferEnd) relay(conn net.Conn, query []byte, send func([]byte) error, timeout time.Duration) ([]byte, error) {
	framed := &dns.Conn{Conn: conn}
	if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return nil, err
	}
	if _, err := framed.Write(query); err != nil {
		return nil, err
	}
	for {
		message, err := framed.ReadMsgHeader(nil)
		if err != nil {
			return nil, err
		}
		ended, err := t.isLast(message)
		if err != nil || ended {
			return message, err
		}
		if err := send(message); err != nil {
			return nil, err
		}
		if err := conn.SetDeadline(time.Now().Add(timeout)); err != nil {
			return nil, err
		}
	}
}

// isLast reports whether a message is the last one of the transfer.
func (t *transferEnd) isLast(message []byte) (bool, error) {
	msg := new(dns.Msg)
	if err := msg.Unpack(message); err != nil || !msg.Response || msg.Id != t.id {
		return false, ErrMalformed
	}
	if msg.Rcode != dns.RcodeSuccess || len(msg.Answer) == 0 {
		return true, nil
	}
	for _, rr := range msg.Answer {
		t.records++
		soa, isSOA := rr.(*dns.SOA)
		switch {
		case t.records == 1 && !isSOA:
			return true, nil // not a transfer: the client decides what to do with it
		case t.records == 1:
			t.serial = soa.Serial
		case t.records == 2 && isSOA && t.incremental && soa.Serial != t.serial:
			t.soaTotal = 3
		}
		if isSOA && soa.Serial == t.serial {
			t.soaCount++
		}
	}
	// The client has the zone already if it has the zone's serial, or a later one (RFC 1982).
	upToDate := t.incremental && t.records == 1 && int32(t.serial-t.clientSerial) <= 0 //nolint:gosec // serials wrap around
	return t.soaCount >= t.soaTotal || upToDate, nil
}
