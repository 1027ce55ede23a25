package connlimit

import "golang.org/x/sys/unix"

// A reserve holds spare descriptors. When the process has no free descriptor left, spend closes one of them, so one
// more client can be accepted. A reserve is safe for concurrent use.
type reserve chan int

// newReserve returns a reserve of size descriptors. If the process cannot open that many, the reserve has fewer.
func newReserve(size int) reserve {
	r := make(reserve, size)
	r.refill()
	return r
}

// spend closes one descriptor of the reserve. It returns false if the reserve is empty.
func (r reserve) spend() bool {
	select {
	case fd := <-r:
		_ = unix.Close(fd) // frees the descriptor in any case
		return true
	default:
		return false
	}
}

// refill opens descriptors until the reserve has its size, or the process can open no more.
func (r reserve) refill() {
	for len(r) < cap(r) {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			return // the next refill tries again
		}
		select {
		case r <- fd:
		default: // another goroutine was first
			_ = unix.Close(fd)
			return
		}
	}
}
