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

// A udpListener reads one socket on one goroutine, which is also the fast path.
//
// It asks the kernel for packets until there are none and only then waits in the
// netpoller. Neither the call that reads nor the one that sends can block, so they do not
// tell Go's scheduler, which would cost as much as making the answer.
type udpListener struct {
	handler  *handler
	address  Addr
	local    netip.AddrPort // what it is bound to
	wildcard bool           // bound to all addresses
	conn     *net.UDPConn
	raw      syscall.RawConn
	stopping atomic.Bool
	stopped  chan struct{} // closed by stop
	errors   *sockets.Pacer

	// The slow path runs on workers.
	passed   chan udpTask // to idle workers
	starting atomic.Int64 // tasks that no worker has begun with
	workers  sync.WaitGroup

	// Workers read, too, when there are many of them.
	second  udpReader
	reading sync.Mutex // guards second
}

// A udpTask is a task with the message that it answers.
type udpTask struct {
	*task
	message *sockets.Message
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
		passed:   make(chan udpTask),
		errors:   newPacer(h, Addr{Network: "udp", Address: local}),
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
func (l *udpListener) send(m *sockets.Message, response []byte) {
	// Nobody waits for a client that cannot be reached, and a socket that cannot
	// be written to is found by its reader.
	_ = l.raw.Write(func(fd uintptr) bool { return m.Send(fd, response) != unix.EAGAIN })
}

// udpLastPackets is how many packets are read after stop at the most: more than a
// receive buffer holds.
const udpLastPackets = 8192

// A udpReader is the goroutine that reads a socket.
type udpReader struct {
	*udpListener
	task *task // of what in holds
	from *arrival
	in   *sockets.Message
	out  []byte
	left int   // packets that are still read after stop
	err  error // of the socket, with which reading ended
}

func (l *udpListener) newReader() udpReader {
	in := sockets.NewMessage(dns.MaxMsgSize, l.wildcard)
	return udpReader{
		udpListener: l, task: new(task), left: udpLastPackets,
		from: l.arrival(in, (*origins).ofUDP), in: in, out: make([]byte, 0, dns.MaxMsgSize),
	}
}

// readAll answers what the kernel holds. It is false when there is nothing left,
// for the netpoller to wait, and true if reading is over.
func (r *udpReader) readAll(fd uintptr) (over bool) {
	for {
		packet, errno := r.in.Receive(fd)
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

// answer answers a packet or passes it to a worker.
func (r *udpReader) answer(fd uintptr, packet []byte) {
	r.task.begin(packet, r.from)
	response, verdict := r.handler.fast(r.out[:0], r.task)
	switch verdict {
	case answered:
	case dropped:
		return
	case later:
		if r.pass(len(packet)) {
			return
		}
		var ok bool
		if response, ok = r.handler.refuse(r.out[:0], r.task); !ok {
			r.handler.forwarder.Overflow()
			return
		}
	}
	if r.in.Send(fd, response) == unix.EAGAIN {
		r.send(r.in, response)
	}
}

// pass passes the task, for a packet of n bytes, to a worker, and takes a new one. It
// reports false if too many wait.
func (r *udpReader) pass(n int) bool {
	if r.starting.Load() >= maxStarting || !r.handler.forwarder.ReserveMemory(n) {
		return false
	}
	message := r.in.Clone(n)
	passed := udpTask{r.task, message}
	passed.keep(message.Packet, r.arrival(message, (*origins).awaitUDP))
	r.task = new(task)
	r.starting.Add(1)
	select {
	case r.passed <- passed:
	default:
		r.workers.Go(func() { r.work(passed) })
	}
	return true
}

// Bounds of the tasks that no worker has begun with. Go runs goroutines in turn: the reader
// comes after all workers that were woken before the netpoller woke it, at 30 µs each, and
// mesh names must not wait for that. So workers read, too, before they begin, if there are
// more of them than fewStarting. Tasks beyond maxStarting are refused.
const (
	fewStarting = 16
	maxStarting = 4096
)

// readFirst reads what the kernel holds, unless another worker does.
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

// work is a worker: it serves a task and those that are passed while it is idle. A new
// goroutine for each task would have to grow its stack each time, a tenth of the cost of a
// forwarded query.
func (l *udpListener) work(t udpTask) {
	growStack()
	var idle *time.Timer
	for {
		if l.starting.Add(-1) > fewStarting {
			l.readFirst()
		}
		if response := l.handler.slow(t.task); response != nil {
			l.send(t.message, response)
		}
		l.handler.forwarder.ReleaseMemory(len(t.packet))
		if idle == nil {
			idle = time.NewTimer(workerIdle)
			defer idle.Stop()
		}
		idle.Reset(workerIdle)
		select {
		case t = <-l.passed:
		case <-idle.C:
			return
		case <-l.stopped:
			return
		}
	}
}

// growStack grows the stack of a new goroutine at once to what a forwarded query needs,
// while there is nothing on it to copy, rather than in steps.
//
//go:noinline
func growStack() {
	var need [6 << 10]byte
	runtime.KeepAlive(&need)
}

// arrival returns how the query in m comes. find asks the kernel for the original destination
// of a query, when that is needed. A client on the loopback interface sent the query to the
// agent or to a stub resolver on this host, so its queries count as not captured.
func (l *udpListener) arrival(m *sockets.Message, find func(*origins, netip.AddrPort, netip.AddrPort) (netip.AddrPort, error)) *arrival {
	from := &arrival{over: overUDP}
	if l.handler.origins != nil {
		from.original = func() (netip.AddrPort, error) {
			client := m.Client()
			if client.Addr().IsLoopback() {
				return netip.AddrPort{}, nil
			}
			return find(l.handler.origins, client, m.Local(l.local))
		}
	}
	return from
}
