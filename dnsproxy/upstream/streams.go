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
	v := p.surveyLocked(now, late)
	room := len(p.all) < 2*maxStreams
	switch {
	case v.best != nil && (v.least < streamQueries || v.open >= maxStreams):
		return v.best, nil
	case room && v.open < maxStreams:
	case room && v.best == nil && v.stalest != nil && now.Sub(v.youngest) > maxLate:
		v.stalest.retire()
	case v.freshest != nil:
		return v.freshest, nil
	default:
		return nil, errTooManyQueries
	}
	s, err := p.openLocked(now)
	if err != nil && v.freshest != nil {
		return v.freshest, nil
	}
	return s, err
}

// A survey says how the connections that take queries are doing.
type survey struct {
	open     int       // how many there are
	best     *stream   // the one with the fewest queries of those that are not silent; may be nil
	least    int       // queries of best
	freshest *stream   // the one that is silent for the shortest time; may be nil
	stalest  *stream   // the one that is silent for the longest time; may be nil
	youngest time.Time // when the last one was opened
}

func (p *streams) surveyLocked(now time.Time, late time.Duration) survey {
	v := survey{least: maxPending}
	shortest, longest := time.Duration(math.MaxInt64), time.Duration(-1)
	for _, s := range p.all {
		n, silence, ok := s.load(now)
		if !ok {
			continue
		}
		v.open++
		if s.born.After(v.youngest) {
			v.youngest = s.born
		}
		if silence > longest {
			v.stalest, longest = s, silence
		}
		if n < maxPending && silence < shortest {
			v.freshest, shortest = s, silence
		}
		if n < v.least && silence <= late {
			v.best, v.least = s, n
		}
	}
	return v
}

// openLocked opens a connection.
func (p *streams) openLocked(now time.Time) (*stream, error) {
	if err := p.server.opening(); err != nil {
		return nil, err
	}
	s := &stream{pool: p, pending: make(map[uint16]*attempt), wake: make(chan struct{}, 1), born: now, used: now}
	if !p.server.client.spawn(s.run) {
		p.server.shut()
		return nil, net.ErrClosed
	}
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
