package upstream

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"syscall"
	"time"
	"unsafe"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

const (
	// udpSlots is how many UDP sockets of a server take queries. Each query leaves from one
	// of them at random. There are no more, because each socket is one more port that a forged reply could hit.
	// A server that is not configured has one, which is closed as soon as no query waits on it. So most queries have a
	// socket of their own.
	udpSlots = 4
	// udpQueries and udpAge bound how long a socket takes queries. So a forger who has found its port cannot use the
	// port for long.
	udpQueries = 128
	udpAge     = 5 * time.Second
	// maxUDPSockets bounds the sockets of a server, including sockets that wait for their
	// last replies, because each costs a goroutine. At the bound, sockets are not replaced, and take more queries.
	maxUDPSockets = 16
)

// udpSockets are a server's UDP sockets.
type udpSockets struct {
	sockets[*udpSocket]
	slots [udpSlots]*udpSocket // sockets that take queries; may be nil; guarded by mu
}

// A udpSocket is a socket that is connected to a server.
type udpSocket struct {
	socket
	pool *udpSockets
	raw  syscall.RawConn
	born time.Time // when it was opened, by the client's clock
	left int       // how many more queries it takes before it is replaced; guarded by mu

	failure error // why it was closed; guarded by mu
}

// transfer calls read(2) or write(2) on a socket that does not block. It bypasses Go's
// scheduler, whose bookkeeping would take longer than the call.
func transfer(trap, fd uintptr, b []byte) (n int, errno unix.Errno) {
	r, _, errno := unix.RawSyscall(trap, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(r), errno //nolint:gosec // at most len(b), or there is an errno
}

// chooseLocked returns the socket in the attempt's slot. It replaces a socket that has taken
// udpQueries queries or is older than udpAge.
func (p *udpSockets) chooseLocked(a *attempt) (*udpSocket, error) {
	slot := a.slot % udpSlots
	if p.server.elsewhere {
		slot = 0
	}
	s := p.slots[slot]
	if s != nil {
		if s.mayTake(len(p.all) >= maxUDPSockets) {
			return s, nil
		}
		s.retire()
	}
	s, err := p.open()
	if err != nil {
		return nil, err
	}
	p.slots[slot] = s
	p.all = append(p.all, s)
	return s, nil
}

// open opens a socket. It connects the socket, so that the kernel drops packets from other senders and reports ICMP
// errors.
func (p *udpSockets) open() (s *udpSocket, err error) {
	if err := p.server.reserveSocket(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.server.releaseSocket()
		}
	}()
	dialer := net.Dialer{Control: p.server.client.config.Control}
	conn, err := dialer.DialContext(context.Background(), "udp", p.server.spec.Addr.String())
	if err != nil {
		return nil, cause(err)
	}
	s = &udpSocket{pool: p, born: p.server.client.config.Clock.Now(), left: udpQueries}
	s.server, s.conn, s.pending = p.server, conn, make(map[uint16]*attempt)
	if raw, ok := conn.(syscall.Conn); ok {
		s.raw, err = raw.SyscallConn()
	}
	if err != nil || !p.server.client.spawn(s.read) {
		_ = conn.Close() // nothing was sent
		return nil, errors.Join(err, net.ErrClosed)
	}
	return s, nil
}

// remove forgets a socket that is closed.
func (p *udpSockets) remove(s *udpSocket) {
	p.sockets.remove(s)
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.slots {
		if p.slots[i] == s {
			p.slots[i] = nil
		}
	}
}

// mayTake reports whether the socket takes another query. irreplaceable is true if the socket cannot be replaced. Then
// it takes queries beyond udpQueries and udpAge.
func (s *udpSocket) mayTake(irreplaceable bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.retired && (irreplaceable || s.left > 0 && s.since(s.born) < udpAge)
}

// send never blocks. If the kernel has no room for the packet, the packet is lost, and send reports no error: a packet may
// be lost on the network, too.
func (s *udpSocket) send(a *attempt, packet []byte) (sent bool, err error) {
	s.mu.Lock()
	if s.retired {
		s.mu.Unlock()
		return false, nil
	}
	if len(s.pending) >= maxPending {
		s.mu.Unlock()
		return false, errTooManyQueries
	}
	id := s.addLocked(a)
	s.left--
	s.mu.Unlock()

	binary.BigEndian.PutUint16(packet, id)
	pool := &s.server.client.writes
	w, ok := pool.Get().(*udpWrite)
	if !ok {
		w = new(udpWrite)
		w.call = func(fd uintptr) { _, w.errno = transfer(unix.SYS_WRITE, fd, w.packet) }
	}
	w.packet, w.errno = packet, 0
	err = s.raw.Control(w.call)
	if err == nil && w.errno != 0 && w.errno != unix.EAGAIN && w.errno != unix.ENOBUFS {
		err = w.errno
	}
	w.packet = nil
	pool.Put(w)
	switch {
	case err == nil, !s.remove(id, a): // the reader may have ended it meanwhile
		return true, nil
	case errors.Is(err, unix.ECONNREFUSED):
		// The kernel reports an error of an earlier packet and did not send this one. Another socket sends it.
		s.end(err)
		return false, nil
	}
	return false, err
}

// retire makes the socket take no more queries, and closes it if none is in flight.
func (s *udpSocket) retire() {
	if idle := s.socket.retire(); idle {
		s.close()
	}
}

// close makes the reader end. The reader then closes the socket and ends the attempts. close does not close the
// socket itself, because that would wait for the reader. The reader may be taking a step of a question that waits for
// the caller of close, and then both would wait forever.
func (s *udpSocket) close() { s.end(net.ErrClosed) }

// end is close with the error of the attempts that are ended.
func (s *udpSocket) end(err error) {
	s.mu.Lock()
	first := s.endLocked()
	if first {
		s.failure = err
	}
	s.mu.Unlock()
	if first {
		_ = s.conn.SetReadDeadline(time.Unix(0, 1)) // if this fails, reading fails, too
	}
}

// sweep ends attempts that have expired without a reply. It closes the socket if nothing waits for a reply on it, and
// the socket is retired, is older than udpAge, or belongs to a server that is not configured.
func (s *udpSocket) sweep(now time.Time) {
	for _, a := range s.removeIf(func(a *attempt) bool { return a.expired(now) }) {
		a.end(nil, ErrTimeout)
	}
	s.mu.Lock()
	idle := !s.awaitedLocked()
	s.retired = s.retired || s.since(s.born) > udpAge || idle && s.server.elsewhere
	idle = idle && s.retired
	s.mu.Unlock()
	if idle {
		s.close()
	}
}

// A udpWrite has the argument and the result of one call of write(2). It is pooled together with the function call, so
// that a call allocates nothing.
type udpWrite struct {
	packet []byte
	errno  unix.Errno
	call   func(fd uintptr)
}

// read reads the socket until it is closed or fails, and then ends its attempts. Its buffer has room for any
// message, so read holds one only while there is something to read.
func (s *udpSocket) read() {
	pool := &s.server.client.buffers
	err := s.raw.Read(func(fd uintptr) bool {
		buffer, ok := pool.Get().(*[dns.MaxMsgSize]byte)
		if !ok {
			buffer = new([dns.MaxMsgSize]byte)
		}
		defer pool.Put(buffer)
		for {
			n, errno := transfer(unix.SYS_READ, fd, buffer[:])
			switch errno {
			case 0:
				s.mu.Lock()
				a := s.removeRepliedLocked(buffer[:n])
				idle := s.retired && len(s.pending) == 0
				s.mu.Unlock()
				if a != nil {
					a.end(bytes.Clone(buffer[:n]), nil)
				}
				if idle {
					return true
				}
			case unix.EINTR:
			case unix.EAGAIN:
				return false
			default:
				// Usually an ICMP error about a packet that this socket has sent (RFC
				// 1122, section 4.1.3.3).
				s.end(errno)
				return true
			}
		}
	})
	s.end(cmp.Or(err, net.ErrClosed))
	_ = s.conn.Close()
	s.pool.remove(s)
	for _, a := range s.removeIf(func(*attempt) bool { return true }) {
		a.end(nil, cause(s.failure))
	}
}
