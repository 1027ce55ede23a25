package egress

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// lookInterval is how often busy directions let the runtime look at the network.
const lookInterval = 500 * time.Microsecond

// A look lets Go's runtime look at the network while goroutines copy. A goroutine that always finds data to copy never
// waits, and without a goroutine that does, the runtime looks at the network only every 10 ms, which queries would
// wait. So a copying goroutine waits for a pipe that it has just written to.
type look struct {
	last atomic.Int64 // when it was, in nanoseconds of the process

	mu   sync.Mutex
	r, w *os.File
	raw  syscall.RawConn // of r
}

// open opens the pipe. Without one, queries wait.
func (l *look) open() (err error) {
	if l.r, l.w, err = os.Pipe(); err != nil {
		return err
	}
	l.raw, err = l.r.SyscallConn()
	return err
}

// close closes the pipe.
func (l *look) close() {
	if l.r != nil {
		_, _ = l.r.Close(), l.w.Close()
	}
}

// atIntervals lets the runtime look at the network if it has not for a while.
func (l *look) atIntervals(now time.Duration) {
	last := l.last.Load()
	if now-time.Duration(last) < lookInterval || !l.last.CompareAndSwap(last, int64(now)) || !l.mu.TryLock() {
		return
	}
	defer l.mu.Unlock()
	if l.raw == nil {
		return
	}
	written := false
	_ = l.raw.Read(func(fd uintptr) bool { // fails at the end
		if !written {
			written = true
			_, err := l.w.Write([]byte{0})
			return err != nil
		}
		_, err := unix.Read(int(fd), make([]byte, 8)) //nolint:gosec // a descriptor
		return err == nil
	})
	runtime.Gosched() // to those that the runtime has found
}
