package dnsproxy

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// tcpReserve is how many clients can still be accepted, one query each, when the process
// has no descriptors left.
const tcpReserve = 4

// tcpFirstQueryTime is how long a new client has to send its query before its connection
// counts as idle when descriptors have run out.
const tcpFirstQueryTime = 50 * time.Millisecond

// tcpClients are the connections of all TCP listeners: they share one bound.
type tcpClients struct {
	max     int
	reserve *sockets.Reserve

	// waiting counts the listeners that wait for room.
	waiting atomic.Int32

	mu   sync.Mutex
	room sync.Cond // signalled when a connection ends or becomes idle, or a listener stops
	open map[*tcpConn]struct{}
}

// newTCPClients bounds connections by maxConns, and by half of the descriptors that this
// process may have: the other half is for nameservers, and whatever else is open.
func newTCPClients(maxConns int, log *slog.Logger) *tcpClients {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err == nil && limit.Cur/2 < uint64(maxConns) { //nolint:gosec // validate bounds it
		bound := max(int(limit.Cur/2), 1) //nolint:gosec // less than maxConns
		log.Warn("degraded: fewer TCP connections are served than configured, since the limit of open files is low",
			"connections", bound, "configured", maxConns, "open files", limit.Cur)
		maxConns = bound
	}
	p := &tcpClients{max: maxConns, reserve: sockets.NewReserve(tcpReserve), open: map[*tcpConn]struct{}{}}
	p.room.L = &p.mu
	return p
}

// close gives up the reserve of descriptors.
func (p *tcpClients) close() { p.reserve.Close() }

// add adds a connection. When there is no room, the connection that has been idle for
// longest is closed; when none is idle, add waits. It reports false, without adding the
// connection, if its listener stops.
func (p *tcpClients) add(c *tcpConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.waiting.Add(1) // before connections are looked at, so that becameIdle is not missed
	defer p.waiting.Add(-1)
	for len(p.open) >= p.max && !c.listener.stopping {
		if idle := p.longestIdle(); idle != nil {
			delete(p.open, idle)
			_ = idle.conn.Close() // its own goroutine finds out
			break
		}
		p.room.Wait()
	}
	if c.listener.stopping {
		return false
	}
	p.open[c] = struct{}{}
	return true
}

// longestIdle returns the connection that waits for a query for longest, nil if every
// connection has a query that is not answered. It is called with mu held.
func (p *tcpClients) longestIdle() *tcpConn {
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

// becameIdle tells listeners that wait for room that a connection has become idle.
func (p *tcpClients) becameIdle() {
	if p.waiting.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.room.Signal()
}

// stop has the listener accept no more, and its connections end once what has already
// come is answered.
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

// freeDescriptor frees a descriptor for a new client: that of the connection that has
// been idle for longest, or else one of the reserve. It reports whether it could, and
// whether the descriptor is of the reserve.
func (p *tcpClients) freeDescriptor() (freed, reserved bool) {
	p.mu.Lock()
	idle := p.longestIdle()
	if idle != nil && time.Since(time.Unix(0, idle.idleSince.Load())) < tcpFirstQueryTime {
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
	_ = idle.conn.Close() // its own goroutine finds out
	select {
	case <-idle.left: // only then the descriptor is free
	case <-time.After(tcpDrainTime):
	}
	return true, false
}
