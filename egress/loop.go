package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"iter"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// eventsAtOnce is how many events the loop takes from the kernel at a time.
	eventsAtOnce = 256
	// timerInterval is the shortest time between two searches for tasks that have waited long enough.
	timerInterval = 10 * time.Millisecond
)

// Errors of a task that has to end.
var (
	errEnded = refuse(ReasonEnd, "the agent ends")
	errGone  = refuse(ReasonClosed, "the client has reset the connection before its host was connected")
)

// A loop carries all connections in one goroutine. It waits for the events of sockets in epoll(7), outside of Go's
// runtime. If each direction of a connection had a goroutine, the runtime would have to wake a goroutine for each
// event. That would cost twice the processor time (see docs/performance.md), and goroutines that copy would take
// processors from queries. Other goroutines may call only the method post.
type loop struct {
	epoll     int
	wake      *socket // an eventfd, to which post writes
	sockets   map[int32]*socket
	nextID    int32
	now       time.Time // when the current events came
	clock     func() time.Time
	waiting   map[*task]struct{}
	nextTimer time.Time       // no task waits for an earlier time; zero if none waits for a time
	deferred  []func()        // called after the next events
	running   sync.WaitGroup  // goroutines that tasks wait for
	ctx       context.Context // ends when tasks have to end; aborted is true then
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
	l := &loop{ctx: ctx, cancel: cancel, epoll: epoll, sockets: map[int32]*socket{}, waiting: map[*task]struct{}{}, now: time.Now(), clock: time.Now}
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

// A socket is a descriptor whose events the loop gets.
type socket struct {
	fd     int
	id     int32  // descriptors are used again after they are closed, ids are not
	events uint32 // the events that the kernel reports
	handle func() // called after an event

	// readable is true from an event until the socket has nothing more to read, and writable is true from an event
	// until the socket has no more room.
	readable, writable bool
	ending             bool // the peer has ended its data or reset the connection
	failed             bool // the peer has reset the connection
	urgent             bool // the peer has sent urgent data, at which a read ends early
}

// The events of connections. The kernel reports each event once, when it begins. It reports room to write only
// with eventsOfWriting.
const (
	eventsOfConn    = unix.EPOLLIN | unix.EPOLLPRI | unix.EPOLLRDHUP | unix.EPOLLET
	eventsOfWriting = eventsOfConn | unix.EPOLLOUT
)

// watch makes the loop call handle after the given events of a descriptor.
func (l *loop) watch(fd int, events uint32, handle func()) (*socket, error) {
	l.nextID++
	s := &socket{fd: fd, events: events, id: l.nextID, handle: handle, writable: events&unix.EPOLLOUT == 0}
	if err := unix.EpollCtl(l.epoll, unix.EPOLL_CTL_ADD, fd, s.event()); err != nil {
		return nil, os.NewSyscallError("epoll_ctl", err)
	}
	l.sockets[int32(fd)] = s //nolint:gosec // a descriptor
	return s, nil
}

// event returns the events of s in the form that epoll_ctl(2) takes.
func (s *socket) event() *unix.EpollEvent {
	return &unix.EpollEvent{Events: s.events, Fd: int32(s.fd), Pad: s.id} //nolint:gosec // a descriptor
}

// setFull records that a connection has no room for more data, and asks the kernel to report when it has room.
func (l *loop) setFull(s *socket) {
	s.writable = false
	if s.events != eventsOfWriting {
		l.change(s, eventsOfWriting)
	}
}

// change asks the kernel for other events of a socket.
func (l *loop) change(s *socket, events uint32) {
	s.events = events
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_MOD, s.fd, s.event()) // cannot fail: the socket is watched, so the kernel needs no more memory
}

// unwatch ends the events of a socket. Its descriptor stays open, perhaps in other processes, too.
func (l *loop) unwatch(s *socket) {
	delete(l.sockets, int32(s.fd)) //nolint:gosec // a descriptor
	_ = unix.EpollCtl(l.epoll, unix.EPOLL_CTL_DEL, s.fd, nil)
}

// close closes a connection. No other process has the descriptor, so epoll(7) forgets it by itself.
func (l *loop) close(s *socket) {
	delete(l.sockets, int32(s.fd)) //nolint:gosec // a descriptor
	_ = unix.Close(s.fd)           // frees the descriptor in any case
}

// reset closes a connection with a reset, which discards data that was not sent.
func (l *loop) reset(s *socket) {
	resetOnClose(s.fd)
	l.close(s)
}

// resetOnClose makes the kernel reset a connection when it is closed.
func resetOnClose(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}) // fails only after the peer has reset it
}

// run waits for events, and calls the functions of their sockets, until done returns true. Then it ends the tasks.
func (l *loop) run(done func() bool) error {
	defer l.abort()
	events := make([]unix.EpollEvent, eventsAtOnce)
	for !done() {
		n, err := unix.EpollWait(l.epoll, events, l.timeout())
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		l.now = l.clock()
		deferred := l.deferred
		l.deferred = nil
		for _, e := range events[:max(n, 0)] {
			if s := l.sockets[e.Fd]; s != nil && s.id == e.Pad {
				s.record(e.Events)
				s.handle()
			}
		}
		for _, f := range deferred {
			f()
		}
		l.runTimers()
	}
	return nil
}

// record records events of a socket.
func (s *socket) record(events uint32) {
	const end = unix.EPOLLRDHUP | unix.EPOLLHUP | unix.EPOLLERR
	s.ending = s.ending || events&end != 0
	s.failed = s.failed || events&unix.EPOLLERR != 0
	s.urgent = s.urgent || events&unix.EPOLLPRI != 0
	s.readable = s.readable || events&(unix.EPOLLIN|end) != 0
	s.writable = s.writable || events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0
}

// timeout returns how long run waits for events, in milliseconds; -1 means for ever.
func (l *loop) timeout() int {
	switch {
	case len(l.deferred) > 0:
		return 0
	case l.nextTimer.IsZero():
		return -1
	}
	return int(max(l.nextTimer.Sub(l.clock()), 0).Milliseconds()) + 1
}

// abort makes the tasks end: it wakes them, and wait fails from now on.
func (l *loop) abort() {
	l.aborted = true
	l.cancel()
	l.wakeAll()
}

// wakeAll wakes the tasks that wait.
func (l *loop) wakeAll() {
	for _, t := range slices.Collect(maps.Keys(l.waiting)) {
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
		_, _ = unix.Write(l.wake.fd, binary.NativeEndian.AppendUint64(nil, 1)) // fails only if the counter is near 2^64
	}
}

// runPosted calls the functions that were posted.
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

// A task is a coroutine: the loop runs its function until the function waits, and resumes it when the wait is over.
type task struct {
	*loop

	client   *socket // the task has to end when this client resets the connection; nil without a client
	resume   func() (struct{}, bool)
	yield    func(struct{}) bool
	deadline time.Time
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

// wait returns when something may have changed: after an event of a socket that calls wakeUp, or at deadline, unless
// deadline is zero. It returns an error if the task has to end.
func (t *task) wait(deadline time.Time) error {
	if err := t.endError(); err != nil {
		return err
	}
	t.sleep(deadline)
	return nil
}

// endError returns an error if the task has to end.
func (t *task) endError() error {
	switch {
	case t.aborted:
		return errEnded
	case t.client != nil && t.client.failed:
		return errGone
	}
	return nil
}

// sleep is like wait, but also waits if the task has to end.
func (t *task) sleep(deadline time.Time) {
	t.deadline = deadline
	t.waiting[t] = struct{}{}
	if !deadline.IsZero() && (t.nextTimer.IsZero() || deadline.Before(t.nextTimer)) {
		t.nextTimer = deadline
	}
	t.yield(struct{}{})
}

// wakeUp resumes the task if it waits.
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
		case t.deadline.IsZero():
		case !l.now.Before(t.deadline):
			due = append(due, t)
		case next.IsZero() || t.deadline.Before(next):
			next = t.deadline
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

// await runs f, which may block, in a goroutine of its own. The task is suspended until f has returned.
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

// A taskStream reads and writes a connection. While it waits, its task is suspended. After the time in the field
// limit it does not wait any longer, and fails.
type taskStream struct {
	*task

	conn  *socket
	limit time.Time
}

// Read reads at least one byte that the peer has sent.
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

// try calls f until f returns something other than EAGAIN. Before each further call it waits for the connection.
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

// retry calls f, and calls it again whenever a signal has interrupted it.
func retry(f func() (int, error)) (int, error) {
	for {
		if n, err := f(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// sockaddr returns an address in the form that the kernel takes.
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
	name, err := syscall.Getsockname(fd) // unix.Getsockname takes one more system call
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
