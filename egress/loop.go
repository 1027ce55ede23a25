package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"iter"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// eventsAtOnce is how many events the loop takes from the kernel at a time.
	eventsAtOnce = 256
	// timerInterval is how often tasks that wait for a time are looked at, at most.
	timerInterval = 10 * time.Millisecond
)

// errEnded is the error of a task that has to end because the server resets all connections.
var errEnded = refuse(ReasonEnd, "the agent ends")

// A loop carries all connections in one goroutine: it waits in epoll(7), outside of Go's runtime, for the events of
// sockets. A goroutine for each direction, which the runtime wakes for each event, costs twice the processor time (see
// docs/performance.md), and takes the processors from queries while it copies. Only post may be called from other
// goroutines.
type loop struct {
	epoll   int
	wake    *socket // an eventfd, which post writes
	sockets map[int32]*socket
	nextID  int32
	now     time.Time // of the current events

	waiting   map[*task]struct{}
	nextTimer time.Time       // no task waits for an earlier time; zero if none waits for a time
	again     []func()        // what continues after the events that have come meanwhile
	running   sync.WaitGroup  // of goroutines that tasks wait for
	ctx       context.Context // ends when tasks have to end; so does aborted
	cancel    func()
	aborted   bool

	mu     sync.Mutex
	posted []func()
	closed bool
}

// newLoop returns a loop that has no sockets.
func newLoop() (*loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &loop{ctx: ctx, cancel: cancel, epoll: epoll, sockets: map[int32]*socket{}, waiting: map[*task]struct{}{}, now: time.Now()}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		l.wake, err = l.watch(wake, unix.EPOLLIN, l.runPosted)
	}
	if err != nil {
		_ = unix.Close(epoll)
		return nil, err
	}
	return l, nil
}

// A socket is a socket whose events the loop gets.
type socket struct {
	fd     int
	id     int32  // descriptors are used again, ids are not
	events uint32 // that are reported
	on     func() // called after an event

	// readable and writable are true from an event until the socket has nothing more to read, or no more room.
	readable, writable bool
	ending             bool // the peer has ended its data or reset the connection
	failed             bool // the peer has reset the connection
}

// Events of connections. These are reported once, when they begin; that there is room, only for those that have asked.
const (
	eventsOfConn    = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET
	eventsOfWriting = eventsOfConn | unix.EPOLLOUT
)

// watch gets the events of a descriptor.
func (l *loop) watch(fd int, events uint32, on func()) (*socket, error) {
	l.nextID++
	s := &socket{fd: fd, events: events, id: l.nextID, on: on, writable: events&unix.EPOLLOUT == 0}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, s.event()); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	l.sockets[int32(fd)] = s //nolint:gosec // a descriptor
	return s, nil
}

// event returns what the kernel is asked for.
func (s *socket) event() *unix.EpollEvent {
	return &unix.EpollEvent{Events: s.events, Fd: int32(s.fd), Pad: s.id} //nolint:gosec // a descriptor
}

// full notes that a connection has no room for more, and asks for the event that it has.
func (l *loop) full(s *socket) {
	s.writable = false
	if s.events != eventsOfWriting {
		l.change(s, eventsOfWriting)
	}
}

// change gets other events of a descriptor.
func (l *loop) change(s *socket, events uint32) {
	s.events = events
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, s.fd, s.event()) // it is watched, so memory is there
}

// unwatch gets no more events of a descriptor, which stays open, also in other processes.
func (l *loop) unwatch(s *socket) {
	delete(l.sockets, int32(s.fd)) //nolint:gosec // a descriptor
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, s.fd, nil)
}

// close closes a connection, which no other process has: so epoll(7) need not be told.
func (l *loop) close(s *socket) {
	delete(l.sockets, int32(s.fd)) //nolint:gosec // a descriptor
	_ = unix.Close(s.fd)           // frees the descriptor in any case
}

// reset closes a connection with a reset, which discards what was not sent.
func (l *loop) reset(s *socket) {
	resetOnClose(s.fd)
	l.close(s)
}

// resetOnClose makes the end of a connection a reset.
func resetOnClose(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // fails after a reset by the peer only
}

// run calls what events are for until done is true. Then it ends the tasks.
func (l *loop) run(done func() bool) error {
	events := make([]unix.EpollEvent, eventsAtOnce)
	for !done() {
		n, err := unix.EpollWait(l.epoll, events, l.timeout())
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		l.now = time.Now()
		again := l.again
		l.again = nil
		for _, e := range events[:max(n, 0)] {
			if s := l.sockets[e.Fd]; s != nil && s.id == e.Pad {
				s.note(e.Events)
				s.on()
			}
		}
		for _, f := range again {
			f()
		}
		l.runTimers()
	}
	l.abort()
	return nil
}

// note takes the events of a socket.
func (s *socket) note(events uint32) {
	const end = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	s.ending = s.ending || events&end != 0
	s.failed = s.failed || events&unix.EPOLLERR != 0
	s.readable = s.readable || events&(unix.EPOLLIN|end) != 0
	s.writable = s.writable || events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0
}

// timeout returns how long to wait for events, in milliseconds.
func (l *loop) timeout() int {
	switch {
	case len(l.again) > 0:
		return 0
	case l.nextTimer.IsZero():
		return -1
	}
	return int(max(time.Until(l.nextTimer), 0).Milliseconds()) + 1
}

// abort ends the tasks: they wait no more.
func (l *loop) abort() {
	l.aborted = true
	l.cancel()
	var all []*task
	for t := range l.waiting {
		all = append(all, t)
	}
	for _, t := range all {
		t.wakeUp()
	}
}

// post makes the loop call f. It may be called from any goroutine. After the loop's end it does nothing.
func (l *loop) post(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	if l.posted = append(l.posted, f); len(l.posted) == 1 {
		_, _ = unix.Write(l.wake.fd, binary.NativeEndian.AppendUint64(nil, 1)) // fails only at 2^64
	}
}

// runPosted calls what was posted.
func (l *loop) runPosted() {
	_, _ = unix.Read(l.wake.fd, make([]byte, 8)) // only this goroutine reads
	l.mu.Lock()
	posted := l.posted
	l.posted = nil
	l.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// end waits for the goroutines of tasks, and closes the descriptors of the loop itself.
func (l *loop) end() {
	l.running.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	l.cancel()
	_, _ = unix.Close(l.wake.fd), unix.Close(l.epoll)
}

// A task is a function that the loop runs until it waits, and again after that: a coroutine.
type task struct {
	*loop

	resume func() (struct{}, bool)
	yield  func(struct{}) bool
	until  time.Time
}

// start runs f as a task.
func (l *loop) start(f func(*task)) {
	t := &task{loop: l}
	t.resume, _ = iter.Pull(func(yield func(struct{}) bool) {
		t.yield = yield
		f(t)
	})
	t.resume()
}

// wait returns when something may have changed: after an event of a socket that has wakeUp, or after a time unless that
// is zero. The error says that the task has to end.
func (t *task) wait(until time.Time) error {
	if t.aborted {
		return errEnded
	}
	t.sleep(until)
	return nil
}

// sleep is wait that does not end early.
func (t *task) sleep(until time.Time) {
	t.until = until
	t.waiting[t] = struct{}{}
	if !until.IsZero() && (t.nextTimer.IsZero() || until.Before(t.nextTimer)) {
		t.nextTimer = until
	}
	t.yield(struct{}{})
}

// wakeUp continues the task if it waits.
func (t *task) wakeUp() {
	if _, waits := t.waiting[t]; waits {
		delete(t.waiting, t)
		t.resume()
	}
}

// runTimers wakes the tasks whose time has come.
func (l *loop) runTimers() {
	if l.nextTimer.IsZero() || l.now.Before(l.nextTimer) {
		return
	}
	var due []*task
	next := time.Time{}
	for t := range l.waiting {
		switch {
		case t.until.IsZero():
		case !l.now.Before(t.until):
			due = append(due, t)
		case next.IsZero() || t.until.Before(next):
			next = t.until
		}
	}
	if soonest := l.now.Add(timerInterval); !next.IsZero() && next.Before(soonest) {
		next = soonest
	}
	l.nextTimer = next
	for _, t := range due {
		t.wakeUp()
	}
}

// await runs f in a goroutine of its own, because it may block, and returns after it.
func (t *task) await(f func()) {
	ended := false
	t.running.Go(func() {
		f()
		t.post(func() {
			ended = true
			t.wakeUp()
		})
	})
	for !ended {
		t.sleep(time.Time{})
	}
}

// A taskStream reads and writes a connection for a task, which waits meanwhile, until a time.
type taskStream struct {
	*task

	conn  *socket
	limit time.Time
}

// Read reads what the peer has sent, at least one byte.
func (s *taskStream) Read(b []byte) (int, error) {
	n, err := s.try(func() (int, error) { return unix.Read(s.conn.fd, b) })
	if err == nil && n == 0 && len(b) > 0 {
		err = io.EOF
	}
	return n, err
}

// Write writes all of b, or fails.
func (s *taskStream) Write(b []byte) (written int, err error) {
	for written < len(b) && err == nil {
		n := 0
		n, err = s.try(func() (int, error) { return unix.Write(s.conn.fd, b[written:]) })
		written += n
	}
	return written, err
}

// try calls f until it does not have to wait.
func (s *taskStream) try(f func() (int, error)) (int, error) {
	for {
		n, err := retry(f)
		switch {
		case !errors.Is(err, unix.EAGAIN):
			return max(n, 0), err
		case !s.now.Before(s.limit):
			return 0, os.ErrDeadlineExceeded
		}
		if err := s.wait(s.limit); err != nil {
			return 0, err
		}
	}
}

// retry calls call until it is not interrupted by a signal.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// sockaddr returns an address for the kernel.
func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	to := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if zone, err := net.InterfaceByName(a.Addr().Zone()); err == nil {
		to.ZoneId = uint32(zone.Index) //nolint:gosec // the kernel's number
	}
	return to
}

// localAddr returns the address that a socket is bound to.
func localAddr(fd int) netip.AddrPort {
	name, err := syscall.Getsockname(fd) // with a system call less than by package unix
	if err != nil {
		return netip.AddrPort{}
	}
	switch a := name.(type) {
	case *syscall.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)) //nolint:gosec // a port
	case *syscall.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)) //nolint:gosec // a port
	}
	return netip.AddrPort{}
}
