package upstream

import (
	"cmp"
	"errors"
	"net"
	"unsafe"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

// A udpWrite is one call of write(2), pooled with its closure.
type udpWrite struct {
	packet []byte
	err    error
	do     func(fd uintptr) bool
}

// write sends a packet and never blocks. If the kernel has no room for the packet, it is lost,
// as a packet may be on the network.
func (s *udpSocket) write(packet []byte) error {
	pool := &s.server.client.writes
	w, ok := pool.Get().(*udpWrite)
	if !ok {
		w = new(udpWrite)
		w.do = func(fd uintptr) bool {
			w.err = nil
			if _, errno := transfer(unix.SYS_WRITE, fd, w.packet); errno != 0 {
				w.err = errno
			}
			return true
		}
	}
	w.packet, w.err = packet, nil
	err := s.raw.Write(w.do)
	if err == nil && w.err != nil && !errors.Is(w.err, unix.EAGAIN) && !errors.Is(w.err, unix.ENOBUFS) {
		err = w.err
	}
	w.packet = nil
	pool.Put(w)
	return err
}

// transfer calls read(2) or write(2) on a socket that does not block. It bypasses Go's
// scheduler, whose bookkeeping would take longer than the call.
func transfer(trap, fd uintptr, b []byte) (n int, errno unix.Errno) {
	r, _, errno := unix.RawSyscall(trap, fd, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(r), errno //nolint:gosec // at most len(b), or there is an errno
}

// read reads the socket until it is closed or fails, and then ends its attempts. It holds a
// buffer, which has room for any message, only while there is something to read.
func (s *udpSocket) read() {
	client := s.server.client
	var failure error
	err := s.raw.Read(func(fd uintptr) bool {
		buffer, ok := client.buffers.Get().(*[dns.MaxMsgSize]byte)
		if !ok {
			buffer = new([dns.MaxMsgSize]byte)
		}
		defer client.buffers.Put(buffer)
		for {
			n, errno := transfer(unix.SYS_READ, fd, buffer[:])
			switch errno {
			case 0:
				if last := s.receive(buffer[:n]); last {
					return true // close would wait for this function
				}
			case unix.EINTR:
			case unix.EAGAIN:
				return false
			default:
				// Usually an ICMP error about a packet that this socket has sent (RFC
				// 1122, section 4.1.3.3).
				failure = errno
				return true
			}
		}
	})
	if failure == nil {
		failure = cmp.Or(err, net.ErrClosed)
	}
	s.close()
	s.pool.remove(s)
	s.endAll(cause(failure), nil)
}
