package listen

import (
	"errors"
	"log/slog"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Dead reports whether err means that a listening socket can never be used again: it is
// closed, shut down or not a listening socket. All other errors are temporary, such as a lack
// of descriptors or memory, or an error of one client.
func Dead(err error) bool {
	return errors.Is(err, net.ErrClosed) || errors.Is(err, unix.EBADF) || errors.Is(err, unix.EINVAL) ||
		errors.Is(err, unix.ENOTSOCK) || errors.Is(err, unix.EOPNOTSUPP)
}

// OutOfDescriptors reports whether err means that this process, or the whole system, has
// no more descriptors.
func OutOfDescriptors(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE)
}

// Waiting reports whether a client waits to be accepted by listener. It waits for a client until timeout has passed.
// It also returns true if accept would return an error: then the caller should call accept to get the error. A signal
// ends the wait.
func Waiting(listener syscall.Conn, timeout time.Duration) bool {
	waiting := 0
	err := withFD(listener, func(fd int) (err error) { // fails on a closed socket, for which accept returns the error
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}} //nolint:gosec // a descriptor
		waiting, err = unix.Poll(poll, int(timeout.Milliseconds()))
		return err
	})
	return waiting > 0 || err != nil && !errors.Is(err, unix.EINTR) // a signal, also of Go's scheduler, is no client
}

// The pause after an error doubles from minPause up to maxPause. After quietTime without an error, the next pause is
// minPause again.
const (
	minPause  = time.Millisecond
	maxPause  = 100 * time.Millisecond
	quietTime = time.Second
)

// logInterval is the least time between two log lines about the errors of a listener.
const logInterval = time.Second

// A Pacer paces the attempts to use one listening socket after temporary errors, and
// logs these errors at most once a second. The zero value is ready to use once Log is set. A Pacer
// is safe for concurrent use.
type Pacer struct {
	// Log logs the errors.
	Log *slog.Logger
	// Listener names the socket in the log.
	Listener string
	// Count is called once for every error; nil counts nothing.
	Count func()

	mu       sync.Mutex
	pause    time.Duration
	last     time.Time // of the last error
	logged   time.Time // when an error was last logged
	unlogged int       // number of errors since logged
}

// Note counts and logs an error and returns how long to wait before the next attempt.
func (p *Pacer) Note(err error) time.Duration {
	if p.Count != nil {
		p.Count()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if now.Sub(p.last) > quietTime {
		p.pause = 0
	}
	p.last = now
	p.pause = min(max(2*p.pause, minPause), maxPause)
	p.unlogged++
	if now.Sub(p.logged) >= logInterval {
		p.Log.Warn("reading from a listener failed, trying again",
			"listener", p.Listener, "errors", p.unlogged, "error", err)
		p.logged, p.unlogged = now, 0
	}
	return p.pause
}

// Wait calls Note, and waits until the pause is over or stop is closed.
func (p *Pacer) Wait(err error, stop <-chan struct{}) {
	timer := time.NewTimer(p.Note(err))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-stop:
	}
}
