package upstream

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// maxPending is how many attempts a socket has at most. Half of the 65,536 IDs stay free, so that a random choice
// soon finds a free one.
const maxPending = 1 << 15

var errTooManyQueries = errors.New("too many queries in flight")

// A socket has what a UDP socket and a connection to a server have in common: the attempts
// that wait for a reply on it, and whether it is retired or closed.
type socket struct {
	server *server

	mu      sync.Mutex
	conn    net.Conn            // nil until it is open
	pending map[uint16]*attempt // by ID
	retired bool                // it takes no more attempts, and is closed when nothing waits for a reply on it
	closed  bool                // a closed socket is retired, too
}

// sockets are all UDP sockets to a server, or all connections to it.
type sockets[S interface {
	comparable
	// send sends a packet and takes over the attempt. It reports false if it has not done so: without an error,
	// the socket is retired.
	send(a *attempt, packet []byte) (sent bool, err error)
	sweep(now time.Time)
	close()
}] struct {
	server *server
	// choose returns the socket that an attempt is to use, and opens one if necessary. It is
	// called with mu held.
	choose func(a *attempt) (S, error)

	mu     sync.Mutex
	closed bool
	all    []S
}

// since returns the time since t on the client's clock.
func (s *socket) since(t time.Time) time.Duration { return s.server.client.config.Clock.Since(t) }

// addLocked adds an attempt and returns its ID. No other attempt of the socket has this ID. The ID is unpredictable,
// because the functions of package rand use ChaCha8 with a seed from the system.
func (s *socket) addLocked(a *attempt) uint16 {
	for {
		id := uint16(rand.Uint32()) //nolint:gosec // the lower half
		if _, taken := s.pending[id]; !taken {
			s.pending[id] = a
			if a.loopProbe != nil {
				a.loopProbe.sending.Store(&sending{s, id})
			}
			return id
		}
	}
}

// remove removes an attempt, and reports whether it was there.
func (s *socket) remove(id uint16, a *attempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[id] != a {
		return false
	}
	delete(s.pending, id)
	return true
}

// removeIf removes the attempts for which match is true.
func (s *socket) removeIf(match func(*attempt) bool) (removed []*attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, a := range s.pending {
		if match(a) {
			removed = append(removed, a)
			delete(s.pending, id)
		}
	}
	return removed
}

// removeRepliedLocked removes and returns the attempt that a message is the reply to. The caller
// ends the attempt. If there is no such attempt, the message is late or forged (RFC 5452, section 9.1), or no response
// at all; then removeRepliedLocked returns nil and counts the message.
func (s *socket) removeRepliedLocked(response []byte) *attempt {
	if len(response) < wire.HeaderLen || response[wire.FlagsOffset]&wire.QR == 0 {
		s.server.stray(true)
		return nil
	}
	id := binary.BigEndian.Uint16(response)
	a := s.pending[id]
	if a == nil || !replies(response, a.opcode, a.text) {
		s.server.stray(false)
		return nil
	}
	delete(s.pending, id)
	return a
}

// awaitedLocked reports whether any attempt is awaited.
func (s *socket) awaitedLocked() bool {
	for _, a := range s.pending {
		if a.awaited() {
			return true
		}
	}
	return false
}

// retire marks the socket as retired, and reports whether it has no attempts.
func (s *socket) retire() (idle bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = true
	return len(s.pending) == 0
}

// endLocked marks the socket as closed, and reports whether it was open.
func (s *socket) endLocked() (first bool) {
	first = !s.closed
	s.retired, s.closed = true, true
	if first {
		s.server.releaseSocket()
	}
	return first
}

// send implements carrier.
func (p *sockets[S]) send(a *attempt, packet []byte) error {
	for {
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			return net.ErrClosed
		}
		s, err := p.choose(a)
		p.mu.Unlock()
		if err != nil {
			return err
		}
		if sent, err := s.send(a, packet); sent || err != nil {
			return err
		}
	}
}

// remove forgets a socket that is closed.
func (p *sockets[S]) remove(s S) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = slices.DeleteFunc(p.all, func(other S) bool { return other == s })
}

// sweep implements carrier.
func (p *sockets[S]) sweep(now time.Time) {
	p.mu.Lock()
	all := slices.Clone(p.all)
	p.mu.Unlock()
	for _, s := range all {
		s.sweep(now)
	}
}

// close implements carrier.
func (p *sockets[S]) close() {
	p.mu.Lock()
	p.closed = true
	all := slices.Clone(p.all)
	p.mu.Unlock()
	for _, s := range all {
		s.close()
	}
}
