package dnsproxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/internal/listen"
)

// udpReceiveBuffer is the size of a socket's receive buffer in bytes. A query takes about 800 bytes of it, and a
// burst of 2,000 queries must not be dropped. Without CAP_NET_ADMIN the kernel grants at most net.core.rmem_max.
const udpReceiveBuffer = 4 << 20

// udpSendBuffer is the size of a socket's send buffer in bytes. An answer occupies it while the kernel looks for the
// link-layer address of the client, and a client can send queries from many addresses that no machine has. The kernel
// keeps at most unres_qlen_bytes (208 KiB) for each of gc_thresh3 (1,024) such addresses, which is less than twice this
// size, the memory that it grants. Without CAP_NET_ADMIN it grants at most twice net.core.wmem_max.
const udpSendBuffer = 128 << 20

// A udpListener reads one socket on one goroutine, which also runs the fast path.
//
// It reads packets until the socket is empty, and only then waits in Go's netpoller. The system calls that read and
// send never block. So Go's scheduler is not told of them, because telling it would take as long as making the answer.
type udpListener struct {
	handler  *front
	address  Addr
	local    netip.AddrPort // the address that the socket is bound to
	wildcard bool           // the socket is bound to all addresses
	unsent   atomic.Int64   // how many responses could not be sent
	conn     *net.UDPConn
	raw      syscall.RawConn
	stopping atomic.Bool
	stopped  chan struct{} // closed by stop
	errors   *listen.Pacer

	// The slow path runs on workers.
	passed  chan udpTask // passes tasks to idle workers
	tasks   atomic.Int64 // how many tasks workers have
	idle    atomic.Int64 // how many workers wait for a task
	workers sync.WaitGroup

	waiting sync.WaitGroup // counts the udpClients
	answers sync.Pool      // of *udpAnswer
}

// A udpTask is a task, and the message that contains its query.
type udpTask struct {
	*task
	message *udpMessage
}

// newUDPListener returns the listener of a socket.
func newUDPListener(h *front, socket *listen.Socket, conn *net.UDPConn) *udpListener {
	raw, err := conn.SyscallConn()
	if err != nil {
		panic(err) // never for an open socket
	}
	local := socket.AddrPort()
	return &udpListener{
		handler: h, conn: conn, raw: raw, local: local, address: socket.Addr,
		wildcard: local.Addr().IsUnspecified(),
		stopped:  make(chan struct{}),
		passed:   make(chan udpTask),
		errors:   newPacer(h, socket.Addr),
	}
}

// configureUDP gives a socket large buffers. If the socket is bound to all addresses, the kernel must also report
// the address that each query was sent to, because the response must be sent from this address.
func configureUDP(conn syscall.RawConn, bound netip.Addr) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		for _, buffer := range []struct{ force, limited, size int }{
			{unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, udpReceiveBuffer}, {unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, udpSendBuffer},
		} {
			if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, buffer.force, buffer.size) != nil {
				// Without the capability the kernel limits the size.
				_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, buffer.limited, buffer.size)
			}
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

// serve reads the socket until stop is called. It returns when every query that it has read is answered.
// It retries after temporary errors, such as a lack of memory.
func (l *udpListener) serve() error {
	defer func() { _ = l.conn.Close() }() // every response has been sent
	defer l.waiting.Wait()
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
		case listen.Dead(err):
			return fmt.Errorf("the DNS listener on %s failed: %w", l.address, err)
		}
		l.errors.Wait(err, l.stopped)
	}
}

// stop makes serve end. Before it ends, serve reads the packets that have already arrived, unless they
// are left to another process ([Server.HandOver]).
func (l *udpListener) stop() {
	l.stopping.Store(true)
	close(l.stopped)
	_ = l.conn.SetReadDeadline(time.Now()) // fails only on a closed socket
}

// send sends a response to the client of a message. It never waits, because its goroutine may serve other clients: if
// the kernel has no room for the response, the response is dropped, as a network may drop it (RFC 8085, section 3.1).
func (l *udpListener) send(m *udpMessage, response []byte) {
	// An error means that the socket is closed.
	_ = l.raw.Control(func(fd uintptr) { l.sendTo(fd, m, response) })
}

// sendTo is send for the socket fd. It tries twice, because the kernel may first return an error that another client has
// caused on the socket, such as ECONNREFUSED.
func (l *udpListener) sendTo(fd uintptr, m *udpMessage, response []byte) {
	errno := m.send(fd, response)
	if errno != 0 && errno != unix.EAGAIN {
		errno = m.send(fd, response)
	}
	if errno != 0 {
		l.unsent.Add(1)
		l.handler.metrics.dropped.Inc()
	}
}

// udpLastPackets bounds the packets that are read after stop. A receive buffer holds fewer.
const udpLastPackets = 8192

// A udpReader has what a goroutine needs to read a socket.
type udpReader struct {
	*udpListener
	task    *task       // the task of the packet that is being answered
	from    *arrival    // how the packet came
	message *udpMessage // the message with the packet
	buffer  []byte      // memory for the response
	left    int         // how many packets may still be read after stop
	err     error       // the error that ended reading; nil for none

	known        [4]netip.Addr // addresses of this host that clients have used last
	unsentBefore int64         // the value of unsent for which known is valid
}

func (l *udpListener) newReader() udpReader {
	message := newUDPMessage(dns.MaxMsgSize, l.wildcard)
	return udpReader{
		udpListener: l, task: newTask(), left: udpLastPackets,
		from: l.arrival(func() *udpMessage { return message }, (*origins).ofUDP), message: message, buffer: make([]byte, 0,
			dns.MaxMsgSize),
	}
}

// readAll answers the packets that have arrived. It reports false when there are no more packets, so that Go's
// netpoller waits for the next one. It reports true when the socket is not to be read any more.
func (r *udpReader) readAll(fd uintptr) (done bool) {
	for {
		packet, errno := r.message.receive(fd)
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
			if r.left--; r.left <= 0 || r.handler.handOver.Load() {
				return true
			}
		}
	}
}

// answer answers a packet or passes it to a worker.
func (r *udpReader) answer(fd uintptr, packet []byte) {
	if !r.reachable() {
		r.handler.metrics.dropped.Inc()
		return
	}
	r.task.begin(packet, r.from)
	response, verdict := r.handler.answerFast(r.buffer[:0], r.task)
	switch verdict {
	case answered:
	case dropped:
		return
	case deferred:
		if r.task.usual && r.task.decision.action == actChaos { // the agent's probes must not depend on workers
			response = r.task.handler.answerSlow(r.task)
			break
		}
		if r.startForwarding(len(packet)) || r.pass(len(packet)) {
			return
		}
		var ok bool
		if response, ok = r.task.handler.refuse(r.buffer[:0], r.task); !ok {
			r.handler.forwarder.Overflow()
			r.task.handler.observeRefused(r.task, seen.Dropped, nil)
			return
		}
	}
	r.sendTo(fd, r.message, response)
}

// reachable reports whether a response can reach the client of the message. A socket that is bound to a loopback
// address reaches only addresses of this host. A client may have another address (IPV6_FREEBIND, ip(7)): the kernel
// would look for its link-layer address, and the response would occupy the send buffer meanwhile.
func (r *udpReader) reachable() bool {
	if !r.local.Addr().IsLoopback() {
		return true
	}
	if n := r.unsent.Load(); n != r.unsentBefore { // the host may have lost an address
		r.unsentBefore, r.known = n, [4]netip.Addr{}
	}
	client := r.message.client().Addr()
	if client.IsLoopback() || slices.Contains(r.known[:], client) {
		return true
	}
	if !listen.OfThisHost(client) {
		return false
	}
	copy(r.known[1:], r.known[:])
	r.known[0] = client
	return true
}

// startForwarding begins to forward the query of the task. n is the length of its packet. In the following cases it
// does nothing and reports false: the query is unusual, the decision is not actForward, the lookup of the original
// destination failed, or long queries have too much memory already.
func (r *udpReader) startForwarding(n int) bool {
	t := r.task
	h := t.handler
	if !t.usual || t.decision.action != actForward {
		return false
	}
	server, err := h.elsewhere(t)
	if err != nil || !h.forwarder.ReserveMemory(n) {
		return false
	}
	h.metrics.requests.Inc()
	h.setMessage(t)
	t.outgoing.Mode = overUDP.mode()
	r.waiting.Add(1)
	h.forwarder.Begin(&t.outgoing,
		&udpClient{listener: r.udpListener, handler: h, message: r.message.clone(n), server: server, began: t.began})
	return true
}

// A udpClient receives the result of one query and sends the response. It has little more than the packet,
// because thousands of clients may wait at the same time.
type udpClient struct {
	listener *udpListener
	handler  *handler
	message  *udpMessage
	server   netip.AddrPort // the value of forward.Query.Server
	began    seen.Moment
}

// Receive sends the response.
func (c *udpClient) Receive(found *forward.Result) {
	l := c.listener
	defer l.waiting.Done()
	a, ok := l.answers.Get().(*udpAnswer)
	if !ok {
		a = &udpAnswer{buffer: make([]byte, 0, udpAnswerSize)}
		a.from = *l.arrival(func() *udpMessage { return a.message }, (*origins).ofUDP)
		a.send = func(fd uintptr) { l.sendTo(fd, a.message, a.response) }
	}
	t := &a.task
	a.message = c.message
	t.begin(c.message.packet, &a.from)
	t.usual = t.query.Parse(t.packet) // the packet was parsed before, so this succeeds
	t.decision, t.outgoing = decision{action: actForward}, forward.Query{Server: c.server}
	t.began, t.measured = c.began, true
	response, result := c.handler.respondResult(a.buffer, t, found)
	c.handler.observe(t, result, response)
	l.handler.metrics.count(result)
	a.response = c.handler.withProvenance(response, 0, t, result)
	_ = l.raw.Control(a.send) // as in udpListener.send
	l.handler.forwarder.ReleaseMemory(len(t.packet))
	a.message, a.response, t.packet, t.found = nil, nil, nil, nil
	l.answers.Put(a)
}

// udpAnswerSize is the length in bytes of nearly all responses over UDP.
const udpAnswerSize = 1232

// A udpAnswer is the memory in which a response is made and sent.
type udpAnswer struct {
	task     task
	from     arrival
	buffer   []byte           // empty; its capacity is for the response
	message  *udpMessage      // the message with the query
	response []byte           // the response to the query
	send     func(fd uintptr) // sends response to the client of message
}

// maxTasks bounds the tasks that workers of one socket have, whatever they wait for. A worker takes about 16 KiB.
const maxTasks = 4096

// pass passes the task to a worker, and makes a new task for the reader. n is the length of the task's packet. pass
// reports false if workers have too many tasks, or if long queries have too much memory already.
func (r *udpReader) pass(n int) bool {
	if r.tasks.Load() >= maxTasks || !r.handler.forwarder.ReserveMemory(n) {
		return false
	}
	message := r.message.clone(n)
	passed := udpTask{r.task, message}
	passed.keep(message.packet, r.arrival(func() *udpMessage { return message }, (*origins).awaitUDP))
	r.task = passed.next()
	r.tasks.Add(1)
	select {
	case r.passed <- passed:
	default:
		r.workers.Go(func() { r.work(passed) })
	}
	return true
}

// workerIdle is how long a worker waits for another task while other workers wait, too. If only one worker waits, it
// waits without a limit. So a few queries a minute start no timers and no workers.
const workerIdle = time.Second

// work is the goroutine of a worker. It serves t, and then tasks that are passed to it while it is idle.
// If each task had a new goroutine, growing its stack would be a tenth of the cost of a
// forwarded query.
func (l *udpListener) work(t udpTask) {
	growStack()
	var timer *time.Timer
	for {
		if response := t.handler.answerSlow(t.task); response != nil {
			l.send(t.message, response)
		}
		l.handler.forwarder.ReleaseMemory(len(t.packet))
		l.tasks.Add(-1)
		var timeout <-chan time.Time
		if l.idle.Add(1) > 1 {
			if timer == nil {
				timer = time.NewTimer(workerIdle)
				defer timer.Stop()
			}
			timer.Reset(workerIdle)
			timeout = timer.C
		}
		select {
		case t = <-l.passed:
			l.idle.Add(-1)
		case <-timeout:
			l.idle.Add(-1)
			return
		case <-l.stopped:
			return
		}
	}
}

// growStack grows the stack of a new goroutine to the size that a forwarded query needs. It does so in one step, and
// while the stack is empty, so that nothing is copied.
//
//go:noinline
func growStack() {
	var need [6 << 10]byte
	runtime.KeepAlive(&need)
}

// arrival returns the arrival of the query in a message. The function find looks up the query's original
// destination when it is needed. Queries of a client on the loopback interface count as not captured, because such a
// client has sent them to the agent or to a stub resolver on this host.
func (l *udpListener) arrival(
	message func() *udpMessage, find func(*origins, netip.AddrPort, netip.AddrPort) (netip.AddrPort, error),
) *arrival {
	return &arrival{
		protocol: overUDP,
		client:   func() netip.AddrPort { return message().client() },
		local:    func() netip.AddrPort { return message().local(l.local) },
		original: func() (netip.AddrPort, error) {
			client := message().client()
			if client.Addr().IsLoopback() {
				return netip.AddrPort{}, nil
			}
			return find(l.handler.origins, client, message().local(l.local))
		},
	}
}
