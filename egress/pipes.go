package egress

import (
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// pipeSize is the size in bytes of a pipe. maxPipes of them stay below the number of pages that
	// the kernel gives a user without privileges (fs.pipe-user-pages-soft, 16,384).
	pipeSize = 256 << 10
	maxPipes = 128
	// keptPipes is how many pipes stay open while no connection uses them.
	keptPipes = 8
)

// A pipe moves bytes between sockets within the kernel.
type pipe struct{ r, w int }

// pipes are the pipes of a server. A direction has one only while it moves bytes, so that idle
// connections need none.
type pipes struct {
	mu   sync.Mutex
	idle []pipe
	open int
}

// get returns an empty pipe. It reports false if there is none, and the caller copies instead.
func (p *pipes) get() (pipe, bool) {
	p.mu.Lock()
	if n := len(p.idle); n > 0 {
		found := p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		return found, true
	}
	if p.open >= maxPipes {
		p.mu.Unlock()
		return pipe{}, false
	}
	p.open++
	p.mu.Unlock()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		p.mu.Lock()
		p.open--
		p.mu.Unlock()
		return pipe{}, false // no descriptors are left
	}
	// A pipe that cannot grow has 64 KiB, which works too.
	_, _ = unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize)
	return pipe{fds[0], fds[1]}, true
}

// put takes back an empty pipe.
func (p *pipes) put(used pipe) {
	p.mu.Lock()
	keep := len(p.idle) < keptPipes
	if keep {
		p.idle = append(p.idle, used)
	}
	p.mu.Unlock()
	if !keep {
		p.discard(used)
	}
}

// discard closes a pipe that may hold bytes.
func (p *pipes) discard(used pipe) {
	_, _ = unix.Close(used.r), unix.Close(used.w) // the descriptors are free in any case
	p.mu.Lock()
	p.open--
	p.mu.Unlock()
}

// close closes the idle pipes.
func (p *pipes) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle = nil
	p.mu.Unlock()
	for _, used := range idle {
		p.discard(used)
	}
}
