// Package connlimit decides which connection of a server is closed when connections, descriptors or memory run out, so
// that no client can hold what all clients share.
//
// A server calls [Limit.Enter] with each connection that it accepts, and [Place.Leave] when the connection has ended. In
// between it says which side waits for the other: [Place.Serve] when it has a whole request, and the client waits;
// [Place.Await] when it begins to write a response, and then waits until the client has read it, and for the next
// request. When the client has read a part of a long response, the server calls Await again. So a connection that idles,
// sends a part of a request, or does not read its response, counts from the last Await. A server without requests, such as
// a relay, calls Serve when a connection carries data. [Place.Hold] counts the memory that a connection needs.
//
// If there is no room, one connection is closed: of the connections whose client has been awaited for newTime, the one that
// has been awaited for longest. If there is none, the client that has the most connections or, if memory runs out, holds
// the most memory, loses a connection: the one that has been awaited for longest or, if all are served, that has been
// served for longest. So a client with few connections has at least newTime for a request, and for its response.
package connlimit

import (
	"cmp"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/listen"
)

const (
	// newTime is how long a client may be awaited before its connection is closed first, spareTime how long a connection
	// in a new state is not closed for its descriptor.
	newTime, spareTime = time.Second, 50 * time.Millisecond
	// reserved is how many clients can still be accepted when the process has no descriptors left, and no connection
	// can be closed.
	reserved = 4
	// network is the length of the IPv6 prefix that one client may have.
	network = 64
	// acceptWait is how long a listener waits for a client at a time while there are no descriptors.
	acceptWait = 100 * time.Millisecond
	// looked is at how many places a choice for a connection looks at most. It then takes some 50 µs.
	looked = 256
)

// A Limit bounds the connections of a server, and the memory that they hold. It is safe for concurrent use.
type Limit struct {
	server   string
	maxConns int
	maxBytes int64
	origin   time.Time // elapsed counts from here
	reserve  reserve
	evicted  atomic.Int64
	held     atomic.Int64 // bytes that all places hold, those of evicted connections included

	mu      sync.Mutex
	places  []*Place
	clients map[netip.Prefix]*client
}

// A client is an IPv4 address or an IPv6 network. All clients without an IP address or at loopback are one client.
type client struct {
	conns int64 // guarded by Limit.mu
	held  atomic.Int64
}

// A Place is the place of one connection. It is safe for concurrent use. A nil Place bounds nothing.
type Place struct {
	limit   *Limit
	conn    net.Conn
	key     netip.Prefix
	client  *client
	since   atomic.Int64 // when the state began: a result of elapsed
	serving atomic.Bool
	held    atomic.Int64
	evicted atomic.Bool
	index   int // in Limit.places, guarded by Limit.mu; -1 after the place was given back
}

// New returns a limit of maxConns connections, which hold up to maxBytes together. server is the label of the metric. The
// caller must call [Limit.Close] in the end.
func New(server string, maxConns int, maxBytes int64) *Limit {
	l := &Limit{server: server, maxConns: maxConns, maxBytes: maxBytes, origin: time.Now(), reserve: make(reserve, reserved), clients: map[netip.Prefix]*client{}}
	l.reserve.refill()
	return l
}

// Close releases the reserve of descriptors. The places stay usable.
func (l *Limit) Close() {
	for l.reserve.spend() {
	}
}

// Metric returns the metric.
func (l *Limit) Metric() prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "nametap_connections_evicted_total", Help: "Connections that were closed to make room for others, by server.",
		ConstLabels: prometheus.Labels{"server": l.server},
	}, func() float64 { return float64(l.evicted.Load()) })
}

// Held returns how many bytes the connections hold.
func (l *Limit) Held() int64 { return l.held.Load() }

// elapsed returns the time since origin. Unlike the wall clock, it is never set back.
func (l *Limit) elapsed() int64 { return int64(time.Since(l.origin)) }

// Enter gives a new connection a place, whose client is awaited. If there is none, Enter closes another connection.
func (l *Limit) Enter(conn net.Conn) *Place {
	p := &Place{limit: l, conn: conn}
	p.since.Store(l.elapsed())
	if tcp, ok := conn.RemoteAddr().(*net.TCPAddr); ok && !tcp.IP.IsLoopback() {
		addr := tcp.AddrPort().Addr().Unmap()
		p.key, _ = addr.Prefix(min(network, addr.BitLen())) // fails for no length of an address
	}
	l.mu.Lock()
	var other *Place
	if len(l.places) >= l.maxConns {
		other = l.evictLocked(nil, false, 0)
	}
	if p.client = l.clients[p.key]; p.client == nil {
		p.client = &client{}
		l.clients[p.key] = p.client
	}
	p.client.conns++
	p.index, l.places = len(l.places), append(l.places, p)
	l.mu.Unlock()
	other.close()
	return p
}

// Accept returns the next connection of a listener, and whether it has a descriptor of the reserve: then the server should
// close it soon. After errors that pass, such as a lack of descriptors, Accept waits as pacer says, and retries. It
// returns an error if the listener is closed or dead. If stopped is closed, it waits no longer.
func (l *Limit) Accept(from net.Listener, pacer *listen.Pacer, stopped <-chan struct{}) (conn net.Conn, spare bool, err error) {
	for {
		conn, err = from.Accept()
		switch socket, ok := from.(syscall.Conn); {
		case err == nil, listen.Dead(err), chans.Closed(stopped):
			return conn, spare, err
		case ok && listen.OutOfDescriptors(err):
			if !listen.Waiting(socket, 0) { // accept(2) fails even if no client waits
				listen.Waiting(socket, acceptWait)
				continue // there may be descriptors when a client comes
			}
			var freed bool
			if freed, spare = l.FreeDescriptor(); freed {
				pacer.Note(err)
				continue // at once, before another part of the process takes the descriptor
			}
		}
		pacer.Wait(err, stopped)
	}
}

// FreeDescriptor frees a descriptor for a connection that could not be accepted. It closes a connection or, if all states
// are newer than spareTime, a descriptor of the reserve. It reports whether it has freed a descriptor, and whether that is
// from the reserve: then the server should close the next connection soon.
func (l *Limit) FreeDescriptor() (freed, reserved bool) {
	freed = l.evict(nil, false, spareTime)
	reserved = !freed && l.reserve.spend()
	return freed || reserved, reserved
}

// Await records that the server waits for the client from now on, to which it writes a response.
func (p *Place) Await() { p.enter(false) }

// Serve records that the client waits for the server from now on, or that the connection carries data.
func (p *Place) Serve() { p.enter(true) }

// Turn calls Serve or Await if the side changes that waits for the other.
func (p *Place) Turn(serving bool) {
	if p != nil && p.serving.Load() != serving {
		p.enter(serving)
	}
}

func (p *Place) enter(serving bool) {
	if p != nil {
		p.since.Store(p.limit.elapsed())
		p.serving.Store(serving)
	}
}

// Unchanged returns how long no side has begun to wait, for a time now.
func (p *Place) Unchanged(now time.Time) time.Duration {
	return now.Sub(p.limit.origin) - time.Duration(p.since.Load())
}

// Hold adds n, which may be negative, to the bytes that the connection holds. If all connections hold too much, Hold
// closes connections. It reports whether the connection is still open.
func (p *Place) Hold(n int64) bool {
	if p == nil {
		return true
	}
	l := p.limit
	p.held.Add(n)
	p.client.held.Add(n)
	for over := l.held.Add(n) > l.maxBytes && n > 0; over; {
		over = l.evict(nil, true, 0)
	}
	return !p.evicted.Load()
}

// Displace closes the connection that is given up first of the clients that have more connections than the client of p. It
// reports whether there was one. A server calls it when something runs out that the limit does not count.
func (p *Place) Displace() bool {
	if p == nil {
		return false
	}
	return p.limit.evict(p, false, 0)
}

// Leave gives the place back. It may be called any number of times.
func (p *Place) Leave() {
	p.limit.mu.Lock()
	p.limit.removeLocked(p)
	p.limit.mu.Unlock()
	p.limit.reserve.refill()
}

// evict closes a connection as evictLocked says. It reports whether there was one.
func (l *Limit) evict(by *Place, forBytes bool, age time.Duration) bool {
	l.mu.Lock()
	p := l.evictLocked(by, forBytes, age)
	l.mu.Unlock()
	p.close()
	return p != nil
}

// evictLocked takes the place that is given up first, for its connection or, if all places hold more than maxBytes, for its
// bytes, unless its state is newer than age. If by is not nil, only clients with more connections than that of by lose one.
// The memory of places that were evicted before is free soon. It returns the place, or nil. The caller must then call
// close, without the lock.
func (l *Limit) evictLocked(by *Place, forBytes bool, age time.Duration) (least *Place) {
	type rank struct{ longAwaited, all, awaited, since int64 }
	var best rank
	now, most, stride := l.elapsed(), int64(0), 1+(len(l.places)-1)/looked
	if forBytes {
		most, stride = l.maxBytes, 1
	}
	for i := rand.IntN(stride); i < len(l.places); i += stride {
		p := l.places[i]
		own, all := int64(1), p.client.conns
		if forBytes {
			own, all = p.held.Load(), p.client.held.Load()
		}
		if most -= own; own == 0 || by != nil && all <= by.client.conns {
			continue
		}
		r := rank{all: all, since: p.since.Load()}
		if !p.serving.Load() {
			r.awaited = 1
			if now-r.since >= int64(newTime) {
				r.longAwaited, r.all = 1, 0
			}
		}
		if least == nil || cmp.Or(cmp.Compare(best.longAwaited, r.longAwaited), cmp.Compare(best.all, r.all),
			cmp.Compare(best.awaited, r.awaited), cmp.Compare(r.since, best.since)) < 0 {
			least, best = p, r
		}
	}
	if least == nil || most >= 0 || now-best.since < int64(age) {
		return nil
	}
	least.evicted.Store(true)
	l.removeLocked(least)
	l.evicted.Add(1)
	return least
}

// removeLocked removes a place, unless it was removed before.
func (l *Limit) removeLocked(p *Place) {
	if p.index < 0 {
		return
	}
	last := len(l.places) - 1
	l.places[p.index], l.places[last].index = l.places[last], p.index
	l.places[last], l.places, p.index = nil, l.places[:last], -1
	if p.client.conns--; p.client.conns == 0 {
		delete(l.clients, p.key)
	}
}

// close closes the connection of an evicted place, nil for none. Its goroutines give back what they hold, and end.
func (p *Place) close() {
	if p != nil {
		_ = p.conn.Close() // closed in any case
	}
}

// A reserve holds spare descriptors. When the process has no free descriptor left, spend closes one of them, so one
// more client can be accepted. A reserve is safe for concurrent use.
type reserve chan int

// spend closes one descriptor of the reserve. It returns false if the reserve is empty.
func (r reserve) spend() bool {
	select {
	case fd := <-r:
		_ = unix.Close(fd) // frees the descriptor in any case
		return true
	default:
		return false
	}
}

// refill opens descriptors until the reserve has its size, or the process can open no more.
func (r reserve) refill() {
	for len(r) < cap(r) {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return // the next refill tries again
		}
		select {
		case r <- fd:
		default: // another goroutine was first
			_ = unix.Close(fd)
			return
		}
	}
}
