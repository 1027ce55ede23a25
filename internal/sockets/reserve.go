package sockets

import (
	"sync"

	"golang.org/x/sys/unix"
)

// A Reserve holds spare descriptors. When the process has no free descriptor left, Spend closes a spare descriptor,
// so one more client can be accepted. A Reserve is safe for concurrent use.
type Reserve struct {
	size int

	mu  sync.Mutex
	fds []int
}

// NewReserve returns a reserve of size descriptors. If the process cannot open that many, the reserve has fewer.
func NewReserve(size int) *Reserve {
	r := &Reserve{size: size}
	r.Refill()
	return r
}

// Spend closes one descriptor of the reserve. It returns false if the reserve is empty.
func (r *Reserve) Spend() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.fds) == 0 {
		return false
	}
	last := len(r.fds) - 1
	_ = unix.Close(r.fds[last]) // frees the descriptor in any case
	r.fds = r.fds[:last]
	return true
}

// Refill opens descriptors until the reserve has its size, or the process can open no more.
func (r *Reserve) Refill() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.fds) < r.size {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return // the next Refill tries again
		}
		r.fds = append(r.fds, fd)
	}
}

// Close closes the descriptors.
func (r *Reserve) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, fd := range r.fds {
		_ = unix.Close(fd) // frees the descriptor in any case
	}
	r.fds, r.size = nil, 0
}
