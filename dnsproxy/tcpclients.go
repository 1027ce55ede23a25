package dnsproxy

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// tcpReserve is how many clients can be accepted, for one query each, after the process
// has run out of descriptors.
const tcpReserve = 4

// tcpFirstQueryTime is how long a new connection does not count as idle, so that its client can
// send a query.
const tcpFirstQueryTime = 50 * time.Millisecond

// tcpMaxHeld bounds, in bytes, what all connections together hold: answers that clients have not read,
// and long queries, of which a part has arrived. Beyond it the one that holds the most is closed.
const tcpMaxHeld = 16 << 20

// tcpClients bounds the connections of all TCP listeners together.
type tcpClients struct {
	max     int
	origin  time.Time // idleSince counts from here
	reserve *sockets.Reserve

	held atomic.Int64 // bytes that the connections hold (tcpMaxHeld)

	mu   sync.Mutex
	open map[*tcpConn]struct{}
}

// newTCPClients bounds the connections by maxConns and by half of the process's limit of
// open files; the other half is for nameservers and everything else.
func newTCPClients(maxConns int, log *slog.Logger) *tcpClients {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil && limit.Cur/2 < uint64(maxConns) { //nolint:gosec // validate bounds it
		bound := max(int(limit.Cur/2), 1) //nolint:gosec // less than maxConns
		log.Warn("degraded: the limit of open files does not allow the configured number of TCP connections",
			"bound", bound, "configured", maxConns, "open files", limit.Cur)
		maxConns = bound
	}
	return &tcpClients{max: maxConns, origin: time.Now(), reserve: sockets.NewReserve(tcpReserve), open: map[*tcpConn]struct{}{}}
}

// now returns the time for idleSince. Unlike the wall clock, it is never set back.
func (p *tcpClients) now() int64 { return int64(time.Since(p.origin)) }

// close releases the reserve of descriptors.
func (p *tcpClients) close() { p.reserve.Close() }

// add adds a connection. When there is no room, it closes another one. It reports false, without adding
// the connection, if its listener stops and there is no room.
func (p *tcpClients) add(c *tcpConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.open) >= p.max {
		if c.listener.stopping {
			return false
		}
		if other, _ := p.leastNeededLocked(); other != nil {
			delete(p.open, other)
			_ = other.conn.Close() // its goroutine ends
		}
	}
	if c.listener.stopping {
		c.drain() // accepted just before the stop, so its query may be on the way
	}
	p.open[c] = struct{}{}
	return true
}

// leastNeededLocked returns the connection that makes room for another one, nil if there is none: the one
// that has been idle the longest; if none is idle, the one whose client has waited the longest for an
// answer, which has the least time left to get one. A new one, whose first query may be on the way, is
// the last choice.
func (p *tcpClients) leastNeededLocked() (least *tcpConn, isNew bool) {
	const idle, waiting, fresh = 0, 1, 2
	kind, since := fresh, p.now()
	for c := range p.open {
		k, s := idle, c.idleSince.Load()
		switch {
		case c.pending.Load() > 0:
			k = waiting
		case !c.answered.Load() && p.now()-s < int64(tcpFirstQueryTime):
			k = fresh
		}
		if least == nil || k < kind || k == kind && s < since {
			least, kind, since = c, k, s
		}
	}
	return least, kind == fresh
}

// hold adds n bytes to what a connection holds. If that is too much for all together, it closes those that
// hold the most; what c holds besides these bytes counts.
func (p *tcpClients) hold(c *tcpConn, n int64) {
	c.held.Add(n)
	if p.held.Add(n) <= tcpMaxHeld || n <= 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.held.Load() > tcpMaxHeld {
		var most *tcpConn
		var mostHeld, closing int64
		for other := range p.open {
			held := other.held.Load()
			if other.shed.Load() {
				closing += held
				continue
			}
			if other == c {
				held -= n
			}
			if held > mostHeld {
				most, mostHeld = other, held
			}
		}
		if most == nil || p.held.Load()-closing <= tcpMaxHeld {
			return
		}
		most.shed.Store(true)
		_ = most.conn.Close() // its goroutines end, and release what they hold
	}
}

// remove removes a connection that has ended.
func (p *tcpClients) remove(c *tcpConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
	p.held.Add(-c.held.Swap(0)) // a query of which only a part has arrived
	p.reserve.Refill()
}

// stop marks the listener as stopping, and lets its connections end once the queries that
// have already arrived are answered.
func (p *tcpClients) stop(l *tcpListener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.stopping = true
	for c := range p.open {
		if c.listener == l {
			c.drain()
		}
	}
}

// freeDescriptor frees a descriptor for a new client: that of the connection that makes room for it,
// otherwise one of the reserve. It reports whether it could, and whether the descriptor is from the
// reserve.
func (p *tcpClients) freeDescriptor() (freed, reserved bool) {
	p.mu.Lock()
	other, isNew := p.leastNeededLocked()
	if !isNew {
		delete(p.open, other)
	}
	p.mu.Unlock()
	if isNew { // or there is none
		reserved = p.reserve.Spend()
		return reserved, reserved
	}
	_ = other.conn.Close() // its goroutine ends
	select {
	case <-other.left: // the descriptor is free only then
	case <-time.After(tcpDrainTime):
	}
	return true, false
}
