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

// tcpFirstQueryTime is how long a new connection does not count as idle when descriptors
// have run out, so that its client can send a query.
const tcpFirstQueryTime = 50 * time.Millisecond

// tcpClients bounds the connections of all TCP listeners together.
type tcpClients struct {
	max     int
	origin  time.Time // idleSince counts from here
	reserve *sockets.Reserve

	// waiting is how many listeners wait for room.
	waiting atomic.Int32

	mu   sync.Mutex
	room sync.Cond // signalled when a connection ends or becomes idle, or a listener stops
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
	p := &tcpClients{max: maxConns, origin: time.Now(), reserve: sockets.NewReserve(tcpReserve), open: map[*tcpConn]struct{}{}}
	p.room.L = &p.mu
	return p
}

// now returns the time for idleSince. Unlike the wall clock, it is never set back.
func (p *tcpClients) now() int64 { return int64(time.Since(p.origin)) }

// close releases the reserve of descriptors.
func (p *tcpClients) close() { p.reserve.Close() }

// add adds a connection. When there is no room, it closes the connection that has been idle
// the longest; when none is idle, it waits. It reports false, without adding the
// connection, if its listener stops and there is no room.
func (p *tcpClients) add(c *tcpConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting.Add(1) // before looking for an idle connection, so that no call of becameIdle is missed
	defer p.waiting.Add(-1)
	for len(p.open) >= p.max && !c.listener.stopping {
		if idle := p.longestIdleLocked(); idle != nil {
			delete(p.open, idle)
			_ = idle.conn.Close() // its goroutine ends
			break
		}
		p.room.Wait()
	}
	if c.listener.stopping {
		if len(p.open) >= p.max {
			return false
		}
		c.drain() // accepted just before the stop, so its query may be on the way
	}
	p.open[c] = struct{}{}
	return true
}

// longestIdleLocked returns the connection that has waited the longest for a query, nil if
// every connection has an unanswered query.
func (p *tcpClients) longestIdleLocked() *tcpConn {
	var idle *tcpConn
	for c := range p.open {
		if c.pending.Load() == 0 && (idle == nil || c.idleSince.Load() < idle.idleSince.Load()) {
			idle = c
		}
	}
	return idle
}

// remove removes a connection that has ended.
func (p *tcpClients) remove(c *tcpConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
	p.reserve.Refill()
	p.room.Signal()
}

// becameIdle wakes a listener that waits for room, since a connection has become idle.
func (p *tcpClients) becameIdle() {
	if p.waiting.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.room.Signal()
}

// stop marks the listener as stopping, and lets its connections end once the queries that
// have already arrived are answered.
func (p *tcpClients) stop(l *tcpListener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.stopping = true
	p.room.Broadcast()
	for c := range p.open {
		if c.listener == l {
			c.drain()
		}
	}
}

// freeDescriptor frees a descriptor for a new client: that of the connection that has been
// idle the longest, otherwise one of the reserve. It reports whether it could, and whether
// the descriptor is from the reserve.
func (p *tcpClients) freeDescriptor() (freed, reserved bool) {
	p.mu.Lock()
	idle := p.longestIdleLocked()
	if idle != nil && p.now()-idle.idleSince.Load() < int64(tcpFirstQueryTime) {
		idle = nil
	}
	if idle != nil {
		delete(p.open, idle)
	}
	p.mu.Unlock()
	if idle == nil {
		reserved = p.reserve.Spend()
		return reserved, reserved
	}
	_ = idle.conn.Close() // its goroutine ends
	select {
	case <-idle.left: // the descriptor is free only then
	case <-time.After(tcpDrainTime):
	}
	return true, false
}
