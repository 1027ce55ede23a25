package upstream

import (
	"math"
	"net"
	"slices"
	"sync"
	"time"
)

// streams are a server's connections, over TCP or TLS.
type streams struct {
	server *server

	mu     sync.Mutex
	closed bool
	all    []*stream
}

// send sends the packet over a connection that is heard from.
func (p *streams) send(a *attempt, packet []byte) {
	a.packet = append(a.packet[:0], packet...)
	for {
		s, err := p.take(a.again)
		if err != nil {
			a.end(nil, err)
			return
		}
		if s.send(a) {
			return
		}
	}
}

// take returns the connection with the fewest queries, or a new one if those that there
// are have many. Connections that have been silent for longer than the server usually
// takes are left alone, as they may be dead, and again, for a query that is asked a second
// time, those that were silent meanwhile. A server gets no more than maxStreams; if all
// of them are silent, the one that has been for the longest loses its place, but no more
// often than every maxLate, since its names may be slow.
func (p *streams) take(again bool) (*stream, error) {
	now, late := time.Now(), minLate
	if !again {
		late = p.server.lateAfter()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	var best, freshest, stalest *stream
	var youngest time.Time
	least, shortest, longest, open := maxPending, time.Duration(math.MaxInt64), time.Duration(-1), 0
	for _, s := range p.all {
		n, silence, ok := s.load(now)
		if !ok {
			continue
		}
		open++
		if s.born.After(youngest) {
			youngest = s.born
		}
		if silence > longest {
			stalest, longest = s, silence
		}
		if n < maxPending && silence < shortest {
			freshest, shortest = s, silence
		}
		if n < least && silence <= late {
			best, least = s, n
		}
	}
	switch {
	case best != nil && (least < streamQueries || open >= maxStreams):
		return best, nil
	case open < maxStreams && len(p.all) < 2*maxStreams:
	case best == nil && stalest != nil && now.Sub(youngest) > maxLate && len(p.all) < 2*maxStreams:
		stalest.retire()
	case freshest != nil:
		return freshest, nil
	default:
		return nil, errTooManyQueries
	}
	s, err := p.openLocked(now)
	if err != nil && freshest != nil {
		return freshest, nil
	}
	return s, err
}

// openLocked opens a connection.
func (p *streams) openLocked(now time.Time) (*stream, error) {
	if err := p.server.mayOpen(); err != nil {
		return nil, err
	}
	s := &stream{pool: p, pending: make(map[uint16]*attempt), wake: make(chan struct{}, 1), born: now, used: now}
	if !p.server.client.spawn(s.run) {
		return nil, net.ErrClosed
	}
	p.server.opened()
	p.all = append(p.all, s)
	return s, nil
}

// remove forgets a connection that has ended.
func (p *streams) remove(s *stream) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all = slices.DeleteFunc(p.all, func(other *stream) bool { return other == s })
}

func (p *streams) sweep(now time.Time) {
	p.mu.Lock()
	all := slices.Clone(p.all)
	p.mu.Unlock()
	for _, s := range all {
		s.sweep(now)
	}
}

func (p *streams) close() {
	p.mu.Lock()
	p.closed = true
	all := slices.Clone(p.all)
	p.mu.Unlock()
	for _, s := range all {
		s.close()
	}
}
