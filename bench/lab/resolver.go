package lab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// A Manner is a client's use of sockets.
type Manner struct {
	What string
	// tcp opens a connection for each query. Over UDP, fresh opens a new socket for each
	// query.
	tcp, fresh bool
}

// Manners are the manners of the C library's resolver, of a resolver that keeps its
// socket, and of a program that retries over TCP after a truncated answer.
func Manners() []Manner {
	return []Manner{
		{What: "UDP, a new socket for each query", fresh: true},
		{What: "UDP, the same socket"},
		{What: "TCP, a connection for each query", tcp: true, fresh: true},
	}
}

// A Resolver sends one query after the other and waits for each answer. It uses blocking
// sockets, because the cost of Go's sockets would hide the differences. It belongs to one
// thread.
type Resolver struct {
	server  unix.SockaddrInet4
	queries [][]byte // in the format of TCP: the length, then the message
	asked   int
	// socket is the socket of queries that do not open a new one, or -1.
	socket int
	buf    [2 + dns.MaxMsgSize]byte
}

// NewResolver returns a resolver that queries the nameserver at addr for the hosts in turn.
// The caller must close it.
func NewResolver(addr netip.AddrPort, m Mix, hosts []Host) (*Resolver, error) {
	r := &Resolver{server: unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}, socket: -1}
	for _, h := range hosts {
		name, qtype := m.question(h)
		message, err := new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype).Pack()
		if err != nil {
			return nil, fmt.Errorf("making a query for %q: %w", name, err)
		}
		query := binary.BigEndian.AppendUint16(nil, uint16(len(message))) // far below 64 KiB
		r.queries = append(r.queries, append(query, message...))
	}
	return r, nil
}

// Close closes the socket.
func (r *Resolver) Close() {
	if r.socket >= 0 {
		_ = unix.Close(r.socket) // no query is in flight
		r.socket = -1
	}
}

// Ask sends the next query, waits for the answer and returns the time of both, including
// the opening of a new socket.
func (r *Resolver) Ask(m Manner) (time.Duration, error) {
	query := r.queries[r.asked%len(r.queries)]
	binary.BigEndian.PutUint16(query[2:], uint16(r.asked)) // IDs may repeat
	r.asked++
	began := time.Now()
	if r.socket < 0 {
		if err := r.open(m); err != nil {
			return 0, fmt.Errorf("asking over %s: %w", m.What, err)
		}
	}
	reply, err := r.exchange(query, m.tcp)
	took := time.Since(began)
	if err == nil {
		err = looksRight(query[2:], reply)
	}
	if m.fresh || err != nil {
		r.Close()
	}
	if err != nil {
		return 0, fmt.Errorf("asking over %s: %w", m.What, err)
	}
	return took, nil
}

// open opens the socket and connects it.
func (r *Resolver) open(m Manner) error {
	kind := unix.SOCK_DGRAM
	if m.tcp {
		kind = unix.SOCK_STREAM
	}
	socket, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	r.socket = socket
	wait := unix.Timeval{Sec: 5}
	if err := unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return err
	}
	return unix.Connect(socket, &r.server)
}

// exchange sends a query and returns the reply.
func (r *Resolver) exchange(query []byte, tcp bool) ([]byte, error) {
	if !tcp {
		if _, err := unix.Write(r.socket, query[2:]); err != nil {
			return nil, err
		}
		n, err := r.read(0)
		return r.buf[:n], err
	}
	if _, err := unix.Write(r.socket, query); err != nil {
		return nil, err
	}
	for have := 0; ; {
		n, err := r.read(have)
		if err != nil {
			return nil, err
		}
		have += n
		if have < 2 {
			continue
		}
		if end := 2 + int(binary.BigEndian.Uint16(r.buf[:])); have >= end {
			return r.buf[2:end], nil
		}
	}
}

// read appends to the buffer.
func (r *Resolver) read(have int) (int, error) {
	for {
		n, err := unix.Read(r.socket, r.buf[have:])
		switch {
		case errors.Is(err, unix.EINTR):
			continue // with SO_RCVTIMEO the kernel does not restart the system call
		case errors.Is(err, unix.EAGAIN):
			return 0, errors.New("no answer in 5 s")
		case err != nil:
			return 0, err
		case n == 0:
			return 0, errors.New("the connection was closed")
		}
		return n, nil
	}
}

// looksRight checks that the reply answers the query and has records. The records
// themselves are checked before the measurement.
func looksRight(query, reply []byte) error {
	const header = 12
	switch {
	case len(reply) < header || reply[0] != query[0] || reply[1] != query[1] || reply[2]&0x80 == 0:
		return fmt.Errorf("an answer to another query: %x", reply)
	case reply[3]&0xf != dns.RcodeSuccess:
		return errors.New(dns.RcodeToString[int(reply[3]&0xf)])
	case binary.BigEndian.Uint16(reply[6:]) == 0:
		return errors.New("an answer without records")
	}
	return nil
}
