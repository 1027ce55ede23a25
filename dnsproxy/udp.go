package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/sockets"
)

// udpReceiveBuffer is what a socket may hold unread, in bytes of the kernel's
// accounting, which is about 800 for a query: a burst of 2,000 must not be dropped.
// Without CAP_NET_ADMIN the kernel gives no more than net.core.rmem_max.
const udpReceiveBuffer = 4 << 20

// A udpListener reads one socket on one goroutine, which answers own names itself.
//
// It asks the kernel for packets until there are none and only then has the
// netpoller wait. Neither that call nor the one that sends can block, so neither
// tells Go's scheduler of it, which would cost as much as making the answer.
type udpListener struct {
	handler  *handler
	address  Addr
	local    netip.AddrPort // that it is bound to
	wildcard bool           // bound to all addresses
	conn     *net.UDPConn
	raw      syscall.RawConn
	stopping atomic.Bool
	stopped  chan struct{} // closed by stop
	errors   *sockets.Pacer

	// What was handed on is served by workers.
	handedOn chan *udpMessage // to those that are idle
	starting atomic.Int64     // messages that no worker has begun with
	workers  sync.WaitGroup

	// Workers read, too, when there are many of them.
	second  udpReader
	reading sync.Mutex // held by who uses second
}

// listenUDP opens a socket on a host:port.
func listenUDP(ctx context.Context, h *handler, network, address string) (*udpListener, error) {
	config := net.ListenConfig{Control: func(_, address string, conn syscall.RawConn) error {
		bound, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		return configureUDP(conn, bound.Addr()) // before any packet can come
	}}
	conn, err := config.ListenPacket(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return newUDPListener(h, conn)
}

// adoptUDP serves a socket that somebody else has opened, or closes it.
func adoptUDP(h *handler, conn net.PacketConn) (*udpListener, error) {
	l, err := newUDPListener(h, conn)
	if err != nil {
		return nil, err
	}
	if err := configureUDP(l.raw, l.local.Addr()); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// newUDPListener serves an open socket, or closes it.
func newUDPListener(h *handler, opened net.PacketConn) (*udpListener, error) {
	local := opened.LocalAddr().String()
	fail := func(err error) (*udpListener, error) {
		_ = opened.Close() // it was never read
		return nil, fmt.Errorf("listening on %s %s: %w", opened.LocalAddr().Network(), local, err)
	}
	conn, ok := opened.(*net.UDPConn)
	if !ok {
		return fail(fmt.Errorf("%T is no UDP socket", opened))
	}
	bound, err := netip.ParseAddrPort(local)
	if err != nil {
		return fail(err)
	}
	raw, err := conn.SyscallConn()
	if err != nil {
		return fail(err)
	}
	l := &udpListener{
		handler: h, conn: conn, raw: raw, local: bound,
		address:  Addr{Network: "udp", Address: local},
		wildcard: bound.Addr().IsUnspecified(),
		stopped:  make(chan struct{}),
		handedOn: make(chan *udpMessage),
		errors:   h.pacer(Addr{Network: "udp", Address: local}),
	}
	l.second = l.newReader()
	return l, nil
}

// configureUDP sets a socket's options: a large receive buffer, and on one that is bound
// to all addresses that it tells the one a query was sent to, which must be the one that
// its response comes from.
func configureUDP(conn syscall.RawConn, bound netip.Addr) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, udpReceiveBuffer) != nil {
			// Without the capability: as much as everybody may have.
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, udpReceiveBuffer)
		}
		switch {
		case !bound.IsUnspecified():
		case bound.Is4():
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		default:
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		}
	})
	return errors.Join(controlErr, err)
}

func (l *udpListener) addr() Addr { return l.address }

// serve reads the socket until stop, and returns when all that was read is
// answered. An error that passes, such as a lack of memory, is waited out.
func (l *udpListener) serve() error {
	defer func() { _ = l.conn.Close() }() // nothing is left to be sent
	defer l.workers.Wait()
	reader := l.newReader()
	for {
		reader.err = nil
		err := l.raw.Read(reader.readAll)
		if err == nil {
			err = reader.err
		}
		switch {
		case err == nil || l.stopping.Load():
			return nil
		case sockets.Dead(err):
			return fmt.Errorf("the DNS listener on %s died: %w", l.address, err)
		}
		l.errors.Wait(err, l.stopped)
	}
}

// stop ends serve. What the kernel already holds is still read.
func (l *udpListener) stop() {
	l.stopping.Store(true)
	close(l.stopped)
	_ = l.conn.SetReadDeadline(time.Now()) // a socket that fails has ended
}

// close closes a socket that was never read.
func (l *udpListener) close() { _ = l.conn.Close() }

// send sends a response to where a message came from.
func (l *udpListener) send(m *udpMessage, response []byte) {
	// Nobody waits for a client that cannot be reached, and a socket that cannot
	// be written to is found by its reader.
	_ = l.raw.Write(func(fd uintptr) bool { return m.send(fd, response) != unix.EAGAIN })
}

// udpLastPackets is how many packets are read after stop at the most: more than a
// receive buffer holds.
const udpLastPackets = 8192

// A udpReader is the goroutine that reads a socket.
type udpReader struct {
	*udpListener
	responder *responder
	in        *udpMessage
	out       []byte
	left      int   // packets that are still read after stop
	err       error // of the socket, with which reading ended
}

func (l *udpListener) newReader() udpReader {
	r := udpReader{
		udpListener: l, responder: newResponder(l.handler), left: udpLastPackets,
		in: newUDPMessage(dns.MaxMsgSize, l.wildcard), out: make([]byte, 0, dns.MaxMsgSize),
	}
	from := arrival{over: overUDP, original: func() (netip.AddrPort, error) {
		return l.handler.origins.ofUDP(r.in.client(), r.in.local(l.local))
	}}
	r.responder.elsewhere = func() bool {
		return l.mayBeCaptured(r.in) && l.handler.mayGoElsewhere(&from)
	}
	return r
}

// readAll answers what the kernel holds. It is false when there is nothing left,
// for the netpoller to wait, and true if reading is over.
func (r *udpReader) readAll(fd uintptr) (over bool) {
	for {
		packet, errno := r.in.receive(fd)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			return false
		case errno != 0:
			r.err = errno
			return true
		}
		r.answer(fd, packet)
		if r.stopping.Load() {
			if r.left--; r.left <= 0 {
				return true
			}
		}
	}
}

// answer answers a packet, or hands it on.
func (r *udpReader) answer(fd uintptr, packet []byte) {
	r.responder.full = r.starting.Load() >= maxStarting || !r.handler.forwarder.FitsMemory(len(packet))
	if response, ok := r.responder.respond(r.out[:0], packet, overUDP); ok {
		if r.in.send(fd, response) == unix.EAGAIN {
			r.send(r.in, response)
		}
		return
	}
	if r.responder.full || !r.handler.forwarder.ReserveMemory(len(packet)) {
		r.handler.forwarder.Overflow()
		return
	}
	r.handOn(r.in.clone(len(packet)))
}

// Bounds of the messages that no worker has begun with. Go runs goroutines in turn:
// the reader comes after all workers that were woken before the netpoller had it woken,
// at 30 µs each, and own names must not wait for that. So workers read, too, before they
// begin, if there are more of them than fewStarting. More than maxStarting are not
// handed on.
const (
	fewStarting = 16
	maxStarting = 4096
)

// readFirst answers what the kernel holds, unless another worker does.
func (l *udpListener) readFirst() {
	if !l.reading.TryLock() {
		return
	}
	defer l.reading.Unlock()
	// The reader finds errors that last. One of a client is found by only one of the
	// two, and has nothing to say to the other.
	_ = l.raw.Control(func(fd uintptr) { l.second.readAll(fd) })
}

// workerIdle is how long a worker waits for more to do.
const workerIdle = time.Second

// handOn has a worker serve a message.
func (l *udpListener) handOn(m *udpMessage) {
	l.starting.Add(1)
	select {
	case l.handedOn <- m:
	default:
		l.workers.Go(func() { l.work(m) })
	}
}

// work serves a message and those that are handed on while it is idle: a new goroutine
// for each would have to grow its stack each time, a tenth of what a forwarded query
// costs.
func (l *udpListener) work(m *udpMessage) {
	growStack()
	var idle *time.Timer
	for {
		if l.starting.Add(-1) > fewStarting {
			l.readFirst()
		}
		if response := l.handler.serve(m.packet, l.arrival(m)); response != nil {
			l.send(m, response)
		}
		l.handler.forwarder.ReleaseMemory(len(m.packet))
		if idle == nil {
			idle = time.NewTimer(workerIdle)
			defer idle.Stop()
		}
		idle.Reset(workerIdle)
		select {
		case m = <-l.handedOn:
		case <-idle.C:
			return
		case <-l.stopped:
			return
		}
	}
}

// growStack has the stack of a new goroutine grow at once to what a forwarded query
// needs, while there is nothing on it that would have to be copied, rather than in steps.
//
//go:noinline
func growStack() {
	var need [6 << 10]byte
	runtime.KeepAlive(&need)
}

// arrival says how a query came. Where one was captured on its way to is asked only
// if somebody wants to know: it is a question to the kernel.
func (l *udpListener) arrival(m *udpMessage) *arrival {
	from := &arrival{over: overUDP}
	if l.mayBeCaptured(m) {
		from.original = func() (netip.AddrPort, error) {
			return l.handler.origins.awaitUDP(m.client(), m.local(l.local))
		}
	}
	return from
}

// mayBeCaptured reports whether it can be known that a message was captured. A client
// on the loopback interface asked us, or a stub resolver on this host.
func (l *udpListener) mayBeCaptured(m *udpMessage) bool {
	return l.handler.origins != nil && !m.client().Addr().IsLoopback()
}
