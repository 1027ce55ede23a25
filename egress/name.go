package egress

import (
	"errors"
	"io"
	"net"
	"os"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// firstRead is the length in bytes of the first buffer for the beginning of a connection. Most
// ClientHellos fit, also those with post-quantum key shares.
const firstRead = 2 << 10

// maxBeginnings bounds the memory in bytes for beginnings that are longer than firstRead, of all connections
// together: some 4,000 of 8 KiB.
const maxBeginnings = 32 << 20

// grow returns a buffer with the contents of buf and four times its capacity, which releaseBeginning gives back.
// It reports false if that is too much memory.
func (s *Server) grow(buf []byte) ([]byte, bool) {
	size := 4 * cap(buf)
	more := int64(size - cap(buf))
	if s.beginnings.Add(more) > maxBeginnings {
		s.beginnings.Add(-more)
		return buf, false
	}
	return append(make([]byte, 0, size), buf...), true
}

// releaseBeginning ends what grow began.
func (s *Server) releaseBeginning(buf []byte) {
	if more := cap(buf) - firstRead; more > 0 {
		s.beginnings.Add(-int64(more))
	}
}

// readName reads the beginning of a connection until it says a name that a host of the route has. It
// returns the name and what was read, for [Server.releaseBeginning], or a refusal.
func (s *Server) readName(conn *net.TCPConn, r *route) (name wire.Name, first []byte, err error) {
	if err := conn.SetReadDeadline(time.Now().Add(s.config.HelloTimeout)); err != nil {
		return wire.Root, nil, refuse(ReasonClosed, "setting a deadline: %w", err)
	}
	buf := make([]byte, 0, firstRead)
	defer func() {
		if err != nil {
			s.releaseBeginning(buf)
		}
	}()
	for {
		text, err := clientsName(buf)
		switch {
		case err == nil:
			name, err := s.check(text, r)
			return name, buf, errors.Join(err, conn.SetReadDeadline(time.Time{}))
		case errors.Is(err, errNoName):
			return wire.Root, nil, refuse(ReasonNoName, "%s needs a name, by SNI or the Host field: %w", r.text(), err)
		case !errors.Is(err, errMore):
			return wire.Root, nil, refuse(ReasonProtocol, "%s needs TLS or HTTP/1: %w", r.text(), err)
		case len(buf) > MaxHello+maxFraming:
			return wire.Root, nil, refuse(ReasonProtocol, "%s: no name within %d bytes", r.text(), MaxHello)
		}
		if len(buf) == cap(buf) {
			var ok bool
			if buf, ok = s.grow(buf); !ok {
				return wire.Root, nil, refuse(ReasonLimit, "%s: no name within %d bytes, and other clients use all memory for longer beginnings", r.text(), len(buf))
			}
		}
		n, err := conn.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return wire.Root, nil, refuse(ReasonSlow, "%s: no name within %v, %d bytes read", r.text(), s.config.HelloTimeout, len(buf))
		case errors.Is(err, io.EOF):
			return wire.Root, nil, refuse(ReasonClosed, "%s: the client ended its data after %d bytes, before it said a name", r.text(), len(buf))
		case err != nil:
			return wire.Root, nil, refuse(ReasonClosed, "%s: reading a name: %w", r.text(), err)
		}
	}
}

// maxFraming bounds the headers of the records of a ClientHello, in bytes: some 3,000 records.
const maxFraming = 16 << 10

// clientsName returns the name that the beginning of a connection says, by TLS or HTTP/1. The
// errors are those of [helloName].
func clientsName(b []byte) (string, error) {
	switch {
	case len(b) == 0:
		return "", errMore
	case b[0] == recordHandshake:
		return helloName(b)
	default:
		return httpName(b)
	}
}

// check returns the name that a client said, or a refusal if no host of the route has it.
func (s *Server) check(text string, r *route) (wire.Name, error) {
	name, err := wire.ParseHostname(text)
	if err != nil {
		return wire.Root, refuse(ReasonOtherName, "%s: the client said %.300q, which is not a hostname: %w", r.text(), text, err)
	}
	if r.hostOf(name) == nil {
		return wire.Root, refuse(ReasonOtherName, "%s: the client said %q", r.text(), hostText(name))
	}
	return name, nil
}
