package clock

import (
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Tick is the time between the ticks of a clock that [New] has made. It is short enough that a changed file is used
// within 1 s: at a tick the change is found, and a moment later a second reading must find the same contents.
const Tick = 800 * time.Millisecond

// A ticker calls the functions of all polls of a clock. It has one timer and one goroutine for all of them, because a
// wake-up of an idle process costs more than reading a file, and Go wakes another thread for each further goroutine.
type ticker struct {
	length time.Duration // from tick to tick
	kernel bool          // whether the timer should be one of the kernel

	mu    sync.Mutex
	polls map[*poll]struct{}
	timer *time.Timer // a timer of Go; nil without polls, and with a timer of the kernel
	file  *os.File    // the timer of the kernel; nil without polls, and with a timer of Go
}

// A poll is a function that a ticker calls.
type poll struct {
	look           func() bool
	interval, left int           // ticks from call to call, and until the next call
	found          chan struct{} // gets a value when look has returned true
}

// add adds a poll that calls look as [Clock.Poll] describes, until remove is called for it.
func (t *ticker) add(interval time.Duration, look func() bool) *poll {
	ticks := max(int(interval/t.length), 1)
	p := &poll{look: look, interval: ticks, left: ticks, found: make(chan struct{}, 1)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.polls) == 0 {
		t.polls = make(map[*poll]struct{})
		if !t.kernel || t.startKernelTimer() != nil {
			t.timer = time.AfterFunc(t.length, t.call)
		}
	}
	t.polls[p] = struct{}{}
	return p
}

// remove ends the calls of p. If a call has begun, remove waits until the call has ended.
func (t *ticker) remove(p *poll) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.polls, p)
	switch {
	case len(t.polls) > 0:
	case t.timer != nil:
		t.timer.Stop()
		t.timer = nil
	case t.file != nil:
		_ = t.file.Close()
		t.file = nil
	}
}

// call calls the functions of the polls that are due. A poll that has missed several ticks is called once.
func (t *ticker) call() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.timer != nil {
		t.timer.Reset(t.length)
	}
	for p := range t.polls {
		if p.left--; p.left > 0 {
			continue
		}
		p.left = p.interval
		if p.look() {
			select {
			case p.found <- struct{}{}:
			default:
			}
		}
	}
}

// startKernelTimer starts a timer of the kernel (timerfd_create(2)), which wakes an idle process once for each tick. A
// timer of Go wakes the process about eight times: Go waits for events with a precision of a millisecond, and Go's
// monitor, which wakes on time, checks every 20 µs until the timer has run.
func (t *ticker) startKernelTimer() error {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("timerfd_create", err)
	}
	file := os.NewFile(uintptr(fd), "timer")
	every := unix.NsecToTimespec(t.length.Nanoseconds())
	err = unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: every, Value: every}, nil)
	conn, connErr := file.SyscallConn()
	if err != nil || connErr != nil {
		_ = file.Close()
		return os.NewSyscallError("timerfd_settime", err)
	}
	t.file = file
	go func() {
		for conn.Read(rung) == nil { // until the file is closed
			t.call()
		}
	}()
	return nil
}

// rung reports whether the time of the timer fd has passed. It makes the system call without telling Go's
// scheduler, because that would wake Go's monitor. This is safe, because reading the timer does not block.
func rung(fd uintptr) bool {
	var times uint64
	_, _, err := syscall.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(&times)), unsafe.Sizeof(times))
	return err != unix.EAGAIN
}
