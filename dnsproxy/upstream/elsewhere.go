package upstream

import (
	"container/list"
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"
)

// Bounds for servers that are asked although they are not configured. Clients choose
// them, and may choose any number.
const (
	// maxElsewhere is how many are remembered.
	maxElsewhere = 512
	// evictElsewhereSockets is the number of open sockets from which on each new server evicts
	// others, first servers that have not replied. A server that has not replied yet may open
	// a socket while at most newElsewhereSockets are open, others while at most
	// maxElsewhereSockets are. Each socket costs a descriptor and one or two goroutines.
	evictElsewhereSockets = 256
	newElsewhereSockets   = 384
	maxElsewhereSockets   = 512
	// elsewhereSlots is how many sockets of such a server take queries. They are closed when
	// nothing is awaited, so that most queries have a socket of their own.
	elsewhereSlots = 1
	// elsewhereLogPause is the least time between lines in the log about any of them.
	elsewhereLogPause = time.Second
)

// elsewhere holds the servers of [Client.Elsewhere]. The client's mutex guards it.
type elsewhere struct {
	byAddr map[netip.AddrPort]*list.Element
	recent *list.List // of *Group, the one asked last in front
	log    limitedLog
}

func newElsewhere() elsewhere {
	return elsewhere{byAddr: make(map[netip.AddrPort]*list.Element), recent: list.New()}
}

// serverOf returns the server of an element of the list.
func serverOf(e *list.Element) *server { return e.Value.(*Group).servers[0] } //nolint:forcetypeassert // no other type is put in

func (e *elsewhere) servers() []*server {
	servers := make([]*server, 0, e.recent.Len())
	for at := e.recent.Front(); at != nil; at = at.Next() {
		servers = append(servers, serverOf(at))
	}
	return servers
}

// Elsewhere returns the group of the one server at an address that a client chose. A server
// that was ever in another group keeps its history. The number of other servers, and of
// sockets to them, is bounded: the servers that were asked least recently are evicted, and
// queries to them fail with [ErrCrowded]. [Client.Status] leaves them out.
func (c *Client) Elsewhere(addr netip.AddrPort) *Group {
	group, victims := c.findElsewhere(addr)
	for _, victim := range victims {
		victim.close()
	}
	return group
}

// findElsewhere returns the group of a server, and the servers that are evicted for it.
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
		if c.elsewhereOpen.Load() >= evictElsewhereSockets {
			victims = e.evict(victims)
		}
	}
	e.byAddr[addr] = e.recent.PushFront(group)
	return group, victims
}

// evict removes the server with open sockets that was asked least recently, and servers without
// sockets that were asked even earlier, and appends them to victims. A server that has replied
// is moved to the front instead, unless all have.
func (e *elsewhere) evict(victims []*server) []*server {
	const steps = 32 // a bound, since a flood calls this for each of its queries
	for range min(steps, e.recent.Len()) {
		at := e.recent.Back()
		s := serverOf(at)
		if s.hasReplied() {
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

// remove forgets a server, which the caller closes.
func (e *elsewhere) remove(at *list.Element) *server {
	s := serverOf(at)
	e.recent.Remove(at)
	delete(e.byAddr, s.spec.Addr)
	s.evicted.Store(true)
	return s
}

// alone returns a group of one server.
func (c *Client) alone(s *server) *Group {
	return &Group{client: c, servers: []*server{s}, timeout: c.latest.Load().Timeout}
}

// hasReplied reports whether the server has ever replied.
func (s *server) hasReplied() bool {
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

// logs logs a line; about servers that are not configured, at most one a second.
func (s *server) logs(level slog.Level, text string, attrs ...slog.Attr) {
	attrs = append(attrs, slog.String("server", s.name))
	logger := s.client.config.Logger
	if s.elsewhere {
		suppressed, due := s.client.elsewhere.log.due(time.Now())
		if !due {
			return
		}
		text += " (not in resolv.conf)"
		if suppressed > 0 {
			attrs = append(attrs, slog.Int("suppressed", suppressed))
		}
	}
	logger.LogAttrs(context.Background(), level, text, attrs...)
}

// A limitedLog bounds the number of lines in the log.
type limitedLog struct {
	mu         sync.Mutex
	last       time.Time // when a line was logged
	suppressed int       // lines since then
}

// due reports whether a line is to be logged now, and how many were suppressed before.
func (l *limitedLog) due(now time.Time) (suppressed int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) < elsewhereLogPause {
		l.suppressed++
		return 0, false
	}
	suppressed, l.last, l.suppressed = l.suppressed, now, 0
	return suppressed, true
}
