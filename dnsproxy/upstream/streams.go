package upstream

import (
	"math"
	"net"
	"time"
)

const (
	// streamQueries is how many queries in flight share a connection before another
	// is opened, of which a server gets maxStreams (RFC 7766, section 6.2.2, wants
	// few).
	streamQueries = 128
	maxStreams    = 4
)

// streams are a server's connections, over TCP or TLS.
type streams struct {
	sockets[*stream]
}

func newStreams(s *server) *streams {
	p := new(streams)
	p.server, p.choose = s, p.chooseLocked
	return p
}

// chooseLocked returns the connection with the fewest queries, or a new one if all have many.
// A connection that has been silent for longer than the server usually takes is left alone,
// since it may be dead; for a query that is sent a second time so is one that has been silent
// since. A server gets at most maxStreams. If all of them are silent, the one that has been
// silent for longest is retired to make room, but at most every maxLate, since it may be the
// names that are slow.
func (p *streams) chooseLocked(a *attempt) (*stream, error) {
	now, late := time.Now(), minLate
	if !a.again {
		late = p.server.lateAfter()
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

// A survey tells how the connections that take queries are doing.
type survey struct {
	open     int       // how many there are
	best     *stream   // has the fewest queries of those that are not silent; may be nil
	least    int       // queries of best
	freshest *stream   // has been silent for the shortest time; may be nil
	stalest  *stream   // has been silent for the longest time; may be nil
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

// openLocked opens a connection. It is proof against forgers, so the case of letters does
// not matter.
func (p *streams) openLocked(now time.Time) (*stream, error) {
	if err := p.server.opening(); err != nil {
		return nil, err
	}
	s := &stream{pool: p, wake: make(chan struct{}, 1), born: now, used: now}
	s.server, s.anyCase, s.pending = p.server, true, make(map[uint16]*attempt)
	if !p.server.client.spawn(s.run) {
		p.server.shut()
		return nil, net.ErrClosed
	}
	p.all = append(p.all, s)
	return s, nil
}
