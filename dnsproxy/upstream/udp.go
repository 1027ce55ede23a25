package upstream

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// udpSlots is how many sockets of a server take queries. With more, a forger
	// needs to hit fewer of them; a query has one of them at random.
	udpSlots = 4
	// udpQueries and udpAge are how long one takes queries, so that a port that was
	// found out is of no use for long.
	udpQueries = 128
	udpAge     = 5 * time.Second
	// maxUDPSockets bounds those that wait for their last replies, too: each costs
	// a goroutine. Beyond it sockets take more queries.
	maxUDPSockets = 16
	// maxPending leaves IDs free to be drawn at random.
	maxPending = 1 << 15
)

var errTooManyQueries = errors.New("too many queries in flight")

// udpSockets are a server's UDP sockets.
type udpSockets struct {
	server *server

	mu     sync.Mutex
	closed bool
	slots  [udpSlots]*udpSocket // that take queries; may be nil
	all    []*udpSocket         // these and those that wait for replies
}

// send sends the packet from the socket in the attempt's slot.
func (p *udpSockets) send(a *attempt, packet []byte) {
	for {
		s, err := p.take(a.slot % p.server.udpSlots())
		if err != nil {
			a.end(nil, err)
			return
		}
		if s.send(a, packet) {
			return
		}
	}
}

// take returns the socket in a slot, which is replaced if it has had its time.
func (p *udpSockets) take(slot uint32) (*udpSocket, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	s := p.slots[slot]
	if s != nil && (s.fresh() || len(p.all) >= maxUDPSockets && s.usable()) {
		return s, nil
	}
	if s != nil {
		s.retire()
	}
	s, err := p.openSocket()
	if err != nil {
		return nil, err
	}
	p.slots[slot] = s
	p.all = append(p.all, s)
	return s, nil
}

// openSocket opens a socket. It is connected, so that the kernel passes over what
// others send, and tells of ICMP errors.
func (p *udpSockets) openSocket() (*udpSocket, error) {
	if err := p.server.opening(); err != nil {
		return nil, err
	}
	s, err := p.dial()
	if err != nil {
		p.server.shut()
	}
	return s, err
}

// dial is openSocket for a socket that is counted.
func (p *udpSockets) dial() (*udpSocket, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(context.Background(), "udp", p.server.spec.Addr.String())
	if err != nil {
		return nil, cause(err)
	}
	s := &udpSocket{pool: p, conn: conn, born: time.Now(), left: udpQueries, pending: make(map[uint16]*attempt)}
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
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.slots {
		if p.slots[i] == s {
			p.slots[i] = nil
		}
	}
	for i := range p.all {
		if p.all[i] == s {
			p.all[i] = p.all[len(p.all)-1]
			p.all[len(p.all)-1] = nil
			p.all = p.all[:len(p.all)-1]
			break
		}
	}
}

func (p *udpSockets) sockets() []*udpSocket {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]*udpSocket(nil), p.all...)
}

// sweep ends attempts and sockets that have had their time.
func (p *udpSockets) sweep(now time.Time) {
	for _, s := range p.sockets() {
		s.sweep(now)
	}
}

func (p *udpSockets) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	for _, s := range p.sockets() {
		s.close()
	}
}

// A udpSocket is a socket that is connected to a server. Its reader ends attempts.
type udpSocket struct {
	pool *udpSockets
	conn net.Conn
	raw  syscall.RawConn
	born time.Time

	mu      sync.Mutex
	pending map[uint16]*attempt // by ID
	left    int                 // queries that it takes
	retired bool                // it takes none, and is closed once none is awaited
	closed  bool
}

// fresh reports whether the socket has not had its time.
func (s *udpSocket) fresh() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.left > 0 && !s.retired && time.Since(s.born) < udpAge
}

func (s *udpSocket) usable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.retired
}

// send sends a packet; false means that the socket is retired.
func (s *udpSocket) send(a *attempt, packet []byte) bool {
	s.mu.Lock()
	if s.retired {
		s.mu.Unlock()
		return false
	}
	if len(s.pending) >= maxPending {
		s.mu.Unlock()
		a.end(nil, errTooManyQueries)
		return true
	}
	id := freeID(s.pending)
	s.pending[id] = a
	s.left--
	s.mu.Unlock()

	binary.BigEndian.PutUint16(packet, id)
	err := s.write(packet)
	if errors.Is(err, unix.ECONNREFUSED) {
		// The kernel told of an earlier packet and did not send this one.
		s.failAll(err, a)
		err = s.write(packet)
	}
	if err != nil && s.remove(id, a) {
		a.end(nil, err)
	}
	return true
}

// freeID draws an unpredictable ID that no attempt has. Package rand's functions
// are ChaCha8 with a seed from the system.
func freeID(pending map[uint16]*attempt) uint16 {
	for {
		id := uint16(rand.Uint32()) //nolint:gosec // the lower half
		if _, taken := pending[id]; !taken {
			return id
		}
	}
}

// remove takes an attempt out of the table, if it is still there.
func (s *udpSocket) remove(id uint16, a *attempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[id] != a {
		return false
	}
	delete(s.pending, id)
	return true
}

// failAll ends all attempts but one, which may be nil, with an error.
func (s *udpSocket) failAll(err error, but *attempt) {
	for _, a := range s.takeIf(func(a *attempt) bool { return a != but }) {
		a.end(nil, err)
	}
}

// takeIf takes attempts out of the table.
func (s *udpSocket) takeIf(is func(*attempt) bool) []*attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	var taken []*attempt
	for id, a := range s.pending {
		if is(a) {
			taken = append(taken, a)
			delete(s.pending, id)
		}
	}
	return taken
}

// A udpWrite is one call of write(2); it is pooled with its closure.
type udpWrite struct {
	packet []byte
	err    error
	do     func(fd uintptr) bool
}

// write sends a packet without ever blocking: what the kernel has no room for is
// lost, as it could be on the way.
func (s *udpSocket) write(packet []byte) error {
	pool := &s.pool.server.client.writes
	w, ok := pool.Get().(*udpWrite)
	if !ok {
		w = new(udpWrite)
		w.do = func(fd uintptr) bool {
			w.err = nil
			if _, errno := transfer(unix.SYS_WRITE, fd, w.packet); errno != 0 {
				w.err = errno
			}
			return true
		}
	}
	w.packet, w.err = packet, nil
	err := s.raw.Write(w.do)
	if err == nil && w.err != nil && !errors.Is(w.err, unix.EAGAIN) && !errors.Is(w.err, unix.ENOBUFS) {
		err = w.err
	}
	w.packet = nil
	pool.Put(w)
	return err
}

// transfer is read(2) or write(2) of a socket that does not block, so Go's scheduler
// need not be told, which would cost more than the call.
func transfer(trap, fd uintptr, b []byte) (n int, errno unix.Errno) {
	r, _, errno := unix.RawSyscall(trap, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(r), errno //nolint:gosec // at most len(b), or there is an errno
}

// read reads the socket until it is closed or fails. A buffer, of the largest size
// that there is, is held only while there is something to read.
func (s *udpSocket) read() {
	client := s.pool.server.client
	var failure error
	err := s.raw.Read(func(fd uintptr) bool {
		buffer, ok := client.buffers.Get().(*[maxMessage]byte)
		if !ok {
			buffer = new([maxMessage]byte)
		}
		defer client.buffers.Put(buffer)
		for {
			n, errno := transfer(unix.SYS_READ, fd, buffer[:])
			switch errno {
			case 0:
				if over := s.receive(buffer[:n]); over {
					return true // close would wait for this function
				}
			case unix.EINTR:
			case unix.EAGAIN:
				return false
			default:
				// Mostly ICMP's word about what was sent from here (RFC 1122, section
				// 4.1.3.3).
				failure = errno
				return true
			}
		}
	})
	if failure == nil {
		failure = cmp.Or(err, net.ErrClosed)
	}
	s.close()
	s.pool.remove(s)
	s.failAll(cause(failure), nil)
}

// retire has the socket take no more queries.
func (s *udpSocket) retire() {
	s.mu.Lock()
	s.retired = true
	idle := len(s.pending) == 0
	s.mu.Unlock()
	if idle {
		s.close()
	}
}

// close closes the socket; its reader ends what is pending.
func (s *udpSocket) close() {
	s.mu.Lock()
	first := !s.closed
	s.retired, s.closed = true, true
	s.mu.Unlock()
	if first {
		s.pool.server.shut()
		_ = s.conn.Close() // its reader finds what is wrong with it
	}
}

// sweep ends attempts whose replies did not come, and closes the socket if it has
// had its time, or its server is not configured, and nothing that it could still bring is
// awaited.
func (s *udpSocket) sweep(now time.Time) {
	for _, a := range s.takeIf(func(a *attempt) bool { return a.expired(now) }) {
		a.end(nil, ErrTimeout)
	}
	s.mu.Lock()
	idle := true
	for _, a := range s.pending {
		idle = idle && !a.awaited()
	}
	s.retired = s.retired || now.Sub(s.born) > udpAge || idle && s.pool.server.elsewhere
	idle = idle && s.retired
	s.mu.Unlock()
	if idle {
		s.close()
	}
}

// receive ends the attempt that a packet is the reply to. It is true if it was the
// last that the socket was kept for.
func (s *udpSocket) receive(packet []byte) (over bool) {
	server := s.pool.server
	if len(packet) < headerLen || packet[2]&flagResponse == 0 {
		server.malformed.Add(1)
		return false
	}
	id := binary.BigEndian.Uint16(packet)
	s.mu.Lock()
	a := s.pending[id]
	is := other
	if a != nil {
		is = judge(packet, a.opcode, a.question)
	}
	switch {
	case is != otherCase:
	case a.verbatim:
		is = matching // the client, whose letters these are, compares them itself
	case !server.client.config.MixCase:
		is = other // letters that nobody mixed come back as they were
	}
	if is != other {
		delete(s.pending, id)
	}
	over = s.retired && len(s.pending) == 0
	s.mu.Unlock()
	switch is {
	case other:
		server.wrong.Add(1) // late, or forged (RFC 5452, section 9.1)
	case matching:
		a.end(append([]byte(nil), packet...), nil)
	case otherCase:
		server.wrong.Add(1)
		a.end(nil, errCase)
	}
	return over
}
