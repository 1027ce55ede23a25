package dnsproxy

import (
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/sockets"
)

// tcpReserve is how many clients can still be accepted, for one query each, when the process
// has no descriptors left.
const tcpReserve = 4

// tcpFirstQueryTime is how long a new connection does not count as idle, so that its client can
// send a query.
const tcpFirstQueryTime = 50 * time.Millisecond

// tcpMaxHeld bounds the memory that all connections together hold, in bytes. This is the memory of answers that
// clients have not read, and of long queries, even if only a part of a query has arrived. If the connections hold
// more, the connection is closed whose client has read nothing for the longest time.
const tcpMaxHeld = 16 << 20

// tcpClients bounds the connections of all TCP listeners together.
type tcpClients struct {
	max     int
	origin  time.Time // elapsed counts from here
	reserve *sockets.Reserve

	heldBytes atomic.Int64 // bytes that the connections hold (tcpMaxHeld)

	mu   sync.Mutex
	open map[*tcpConn]struct{}
}

// newTCPClients returns a tcpClients that allows maxConns connections, but not more than half of the process's limit
// of open files. The other half is for nameservers and everything else.
func newTCPClients(maxConns int, log *slog.Logger) *tcpClients {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	if err == nil && limit.Cur/2 < uint64(maxConns) { //nolint:gosec // validate bounds it
		bound := max(int(limit.Cur/2), 1) //nolint:gosec // less than maxConns
		log.Warn("degraded: the limit of open files allows fewer TCP connections; raise it, such as by LimitNOFILE= of the unit",
			"bound", bound, "wanted", maxConns, "open files", limit.Cur)
		maxConns = bound
	}
	return &tcpClients{max: maxConns, origin: time.Now(), reserve: sockets.NewReserve(tcpReserve),
		open: map[*tcpConn]struct{}{}}
}

// elapsed returns the time since origin. Unlike the wall clock, it is never set back.
func (p *tcpClients) elapsed() int64 { return int64(time.Since(p.origin)) }

// close releases the reserve of descriptors.
func (p *tcpClients) close() { p.reserve.Close() }

// add adds a connection. If there is no room for it, add closes another connection. But if the listener of the
// connection is stopping, add does nothing and reports false.
func (p *tcpClients) add(c *tcpConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.open) >= p.max {
		if c.listener.stopping {
			return false
		}
		if other, _ := p.leastNeededLocked(); other != nil {
			delete(p.open, other)
			p.closeLocked(other)
		}
	}
	if c.listener.stopping {
		c.drain() // accepted just before the stop, so its query may be on the way
	}
	p.open[c] = struct{}{}
	return true
}

// leastNeededLocked returns the connection that is closed first if another one needs room. It is the connection that
// has been idle the longest. If none is idle, it is the connection whose client has read nothing of its answers for
// the longest time. New connections are chosen last, because their first query may be on the way. isNew is true if
// there are only new connections. If there is no connection, the result is nil, and isNew is true.
func (p *tcpClients) leastNeededLocked() (victim *tcpConn, isNew bool) {
	const idle, waiting, fresh = 0, 1, 2
	kind, since := fresh, p.elapsed()
	for c := range p.open {
		k, s := idle, c.idleSince.Load()
		switch {
		case c.pendingCost.Load() > 0 || c.heldBytes.Load() > 0:
			k, s = waiting, max(s, c.progress.Load())
		case !c.answered.Load() && p.elapsed()-s < int64(tcpFirstQueryTime):
			k = fresh
		}
		if victim == nil || k < kind || k == kind && s < since {
			victim, kind, since = c, k, s
		}
	}
	return victim, kind == fresh
}

// hold adds n to the number of bytes that a connection holds; n may be negative. If all connections together hold
// more than tcpMaxHeld, hold closes the connections whose clients have read nothing for the longest time. It does not
// count the bytes of connections that it has closed, because these bytes are soon released.
func (p *tcpClients) hold(c *tcpConn, n int64) {
	if c.heldBytes.Add(n) == n {
		c.progress.Store(p.elapsed())
	}
	if p.heldBytes.Add(n) <= tcpMaxHeld || n <= 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		var slowest *tcpConn
		total, since := int64(0), int64(math.MaxInt64)
		for other := range p.open {
			held, progress := other.heldBytes.Load(), other.progress.Load()
			if held == 0 || other.shed.Load() {
				continue
			}
			if total += held; progress < since {
				slowest, since = other, progress
			}
		}
		if total <= tcpMaxHeld {
			return
		}
		p.closeLocked(slowest)
	}
}

// closeLocked closes a connection. The goroutines of the connection make no more answers, release what they hold, and
// end.
func (p *tcpClients) closeLocked(c *tcpConn) {
	c.shed.Store(true)
	_ = c.conn.Close()
}

// remove removes a connection that has ended.
func (p *tcpClients) remove(c *tcpConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
	p.reserve.Refill()
}

// stop marks a listener as stopping. It makes the listener's connections end once the queries that
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

// freeDescriptor frees a descriptor for a new client. It closes the connection that is needed least. If there are
// only new connections, or none, it closes no connection, but frees a descriptor of the reserve. It reports whether
// it has freed a descriptor, and whether the descriptor is from the reserve.
func (p *tcpClients) freeDescriptor() (freed, reserved bool) {
	p.mu.Lock()
	other, isNew := p.leastNeededLocked()
	if !isNew {
		delete(p.open, other)
		p.closeLocked(other)
	}
	p.mu.Unlock()
	if isNew { // there are only new connections, or none
		reserved = p.reserve.Spend()
		return reserved, reserved
	}
	select {
	case <-other.readDone: // until then, the descriptor is in use
	case <-time.After(tcpDrainTime):
	}
	return true, false
}
