package upstream

import (
	"container/list"
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"
)

// Bounds of the servers that are asked though they are not configured. Clients choose
// them, and may choose any number.
const (
	// maxElsewhere is how many are remembered.
	maxElsewhere = 512
	// fewElsewhereSockets is from how many open sockets on each new server takes the place
	// of others, first of those that have not replied. newElsewhereSockets is how many may be open for a server that has not
	// replied yet to have one more, and maxElsewhereSockets for others. Each socket is a
	// descriptor and one or two goroutines.
	fewElsewhereSockets = 256
	newElsewhereSockets = 384
	maxElsewhereSockets = 512
	// elsewhereSlots is how many sockets of one take queries. They are closed when nothing is
	// awaited, so that most queries have one of their own.
	elsewhereSlots = 1
	// elsewhereLogPause is the time between lines in the log about any of them.
	elsewhereLogPause = time.Second
)

// elsewhere are the servers of [Client.Elsewhere], which the client's mutex guards.
type elsewhere struct {
	byAddr map[netip.AddrPort]*list.Element
	recent *list.List // of *Group, the one asked last in front
	log    limitedLog
}

func newElsewhere() elsewhere {
	return elsewhere{byAddr: make(map[netip.AddrPort]*list.Element), recent: list.New()}
}

// only returns the server of a group in the list.
func only(e *list.Element) *server { return e.Value.(*Group).servers[0] } //nolint:forcetypeassert // no other type is put in

func (e *elsewhere) servers() []*server {
	servers := make([]*server, 0, e.recent.Len())
	for at := e.recent.Front(); at != nil; at = at.Next() {
		servers = append(servers, only(at))
	}
	return servers
}

// Elsewhere returns the group of the one server at an address, to which a client sends
// queries of its own choice. If the server was ever in a group, it is the same with the
// same history. Of other servers so many are remembered, and so many sockets to them are
// open, as this package bounds: servers that were asked least recently make room, and
// queries to them fail with [ErrCrowded]. [Client.Status] leaves them out.
func (c *Client) Elsewhere(addr netip.AddrPort) *Group {
	group, victims := c.findElsewhere(addr)
	for _, victim := range victims {
		victim.close()
	}
	return group
}

// findElsewhere returns the group of a server, and the servers that make room for it.
func (c *Client) findElsewhere(addr netip.AddrPort) (group *Group, victims []*server) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s, known := c.servers[Spec{Addr: addr}]; known {
		if s.alone == nil {
			s.alone = c.alone(s)
		}
		return s.alone, nil
	}
	e := &c.elsewhere
	if at, known := e.byAddr[addr]; known {
		e.recent.MoveToFront(at)
		return at.Value.(*Group), nil //nolint:forcetypeassert // no other type is put in
	}
	s := c.newServer(Spec{Addr: addr})
	s.elsewhere = true
	group = c.alone(s)
	if e.recent.Len() >= maxElsewhere {
		victims = e.evict(victims)
	}
	const victimsEach = 2 // a server may have more than one socket
	for range victimsEach {
		if c.elsewhereOpen.Load() >= fewElsewhereSockets {
			victims = e.evict(victims)
		}
	}
	e.byAddr[addr] = e.recent.PushFront(group)
	return group, victims
}

// evict removes a server with sockets that was asked least recently, and those before it,
// and appends them to victims. Servers that have replied get a second chance, unless the
// list is full of them.
func (e *elsewhere) evict(victims []*server) []*server {
	const looked = 32 // this is done for every query of a flood
	for range min(looked, e.recent.Len()) {
		at := e.recent.Back()
		s := only(at)
		if s.heardOf() {
			e.recent.MoveToFront(at)
			continue
		}
		hadSockets := s.open.Load() > 0
		victims = append(victims, e.remove(at))
		if hadSockets {
			return victims
		}
	}
	if e.recent.Len() >= maxElsewhere {
		victims = append(victims, e.remove(e.recent.Back()))
	}
	return victims
}

// remove forgets a server, which is to be closed.
func (e *elsewhere) remove(at *list.Element) *server {
	s := only(at)
	e.recent.Remove(at)
	delete(e.byAddr, s.spec.Addr)
	s.evicted.Store(true)
	return s
}

// alone returns a group of one server.
func (c *Client) alone(s *server) *Group {
	return &Group{client: c, servers: []*server{s}, timeout: c.config.Timeout}
}

// heardOf reports whether the server has ever replied.
func (s *server) heardOf() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.srtt != 0
}

// udpSlots is how many of the server's UDP sockets take queries.
func (s *server) udpSlots() uint32 {
	if s.elsewhere {
		return elsewhereSlots
	}
	return udpSlots
}

// logs writes a line to the log; about servers that are not configured, at most one a
// second.
func (s *server) logs(level slog.Level, text string, attrs ...slog.Attr) {
	attrs = append(attrs, slog.String("server", s.spec.String()))
	logger := s.client.config.Logger
	if s.elsewhere {
		more, due := s.client.elsewhere.log.due(time.Now())
		if !due {
			return
		}
		text += " (resolv.conf does not name it)"
		if more > 0 {
			attrs = append(attrs, slog.Int("lines left out before", more))
		}
	}
	logger.LogAttrs(context.Background(), level, text, attrs...)
}

// A limitedLog says which lines are written.
type limitedLog struct {
	mu      sync.Mutex
	last    time.Time
	leftOut int
}

// due reports whether a line is to be written now, and how many were left out before.
func (l *limitedLog) due(now time.Time) (leftOut int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) < elsewhereLogPause {
		l.leftOut++
		return 0, false
	}
	leftOut, l.last, l.leftOut = l.leftOut, now, 0
	return leftOut, true
}
