package egress

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// bufferSize is the size in bytes of the buffers for directions that are not busy. A direction is
// busy once it fills one, and no longer when a splice moves less than that.
const bufferSize = 16 << 10

// A direction copies from one connection to the other one.
type direction struct {
	from, to         *net.TCPConn
	fromRaw, toRaw   syscall.RawConn
	buffers          *sync.Pool // of *[bufferSize]byte
	pipes            *pipes
	copied           *atomic.Int64
	busy             bool
	buffer           *[bufferSize]byte
	pipe             pipe
	pending, written int // bytes in buffer or pipe, and how many of those are sent
	spliced          bool
	err              error
	read, write      func(fd uintptr) bool // kept, so that they are made once
}

// newDirection returns a direction whose bytes are counted in copied.
func (s *Server) newDirection(from, to *net.TCPConn, copied *atomic.Int64) (*direction, error) {
	d := &direction{from: from, to: to, buffers: &s.buffers, pipes: &s.pipes, copied: copied}
	var err, toErr error
	d.fromRaw, err = from.SyscallConn()
	d.toRaw, toErr = to.SyscallConn()
	d.read, d.write = d.readOnce, d.writeOnce
	return d, errors.Join(err, toErr)
}

// run copies until from has ended its data, which it passes on to to, or until one of the two has
// failed. While from has nothing to send, the direction holds neither a buffer nor a pipe.
func (d *direction) run() error {
	for {
		if err := d.fromRaw.Read(d.read); err != nil {
			return err
		}
		switch {
		case errors.Is(d.err, io.EOF):
			return d.to.CloseWrite()
		case d.err != nil:
			return d.err
		}
		err := d.toRaw.Write(d.write)
		d.release()
		if err = errors.Join(err, d.err); err != nil {
			return err
		}
	}
}

// readOnce reads from the source once. It reports false if there is nothing to read yet.
func (d *direction) readOnce(fd uintptr) bool {
	d.pending, d.written, d.spliced = 0, 0, false
	if d.busy {
		d.pipe, d.spliced = d.pipes.get()
	}
	var n int
	var err error
	if d.spliced {
		n, err = retry(func() (int, error) { return splice(int(fd), d.pipe.w, pipeSize) }) //nolint:gosec // a descriptor
	} else {
		d.buffer = d.buffers.Get().(*[bufferSize]byte)
		n, err = retry(func() (int, error) { return unix.Read(int(fd), d.buffer[:]) }) //nolint:gosec // a descriptor
	}
	if errors.Is(err, unix.EAGAIN) {
		d.release()
		return false
	}
	d.pending, d.err = max(n, 0), err
	if err == nil && n == 0 {
		d.err = io.EOF
	}
	d.busy = n >= bufferSize
	if d.err != nil {
		d.release()
	}
	return true
}

// writeOnce sends what was read. It reports false if the destination does not take all of it yet.
func (d *direction) writeOnce(fd uintptr) bool {
	for d.written < d.pending {
		var n int
		var err error
		if d.spliced {
			n, err = retry(func() (int, error) { return splice(d.pipe.r, int(fd), d.pending-d.written) }) //nolint:gosec // a descriptor
		} else {
			n, err = retry(func() (int, error) { return unix.Write(int(fd), d.buffer[d.written:d.pending]) }) //nolint:gosec // a descriptor
		}
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		if err != nil {
			d.err = err
			return true
		}
		d.written += n
		d.copied.Add(int64(n))
	}
	return true
}

// release gives back the buffer or the pipe.
func (d *direction) release() {
	switch {
	case d.spliced && d.written < d.pending:
		d.pipes.discard(d.pipe)
	case d.spliced:
		d.pipes.put(d.pipe)
	case d.buffer != nil:
		d.buffers.Put(d.buffer)
		d.buffer = nil
	}
	d.spliced = false
}

// splice moves up to n bytes between a socket and a pipe.
func splice(from, to, n int) (int, error) {
	moved, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	return int(moved), err
}

// retry calls call until it is not interrupted by a signal.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// wasReset waits until a connection whose data has ended is closed. It reports whether the peer
// reset it, or has vanished.
func wasReset(conn syscall.RawConn) bool {
	failed := false
	err := conn.Read(func(fd uintptr) bool {
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR) //nolint:gosec // a descriptor
		if failed = err != nil || code != 0; failed {
			return true
		}
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO) //nolint:gosec // a descriptor
		return err != nil || info.State == unix.BPF_TCP_CLOSE
	})
	return err == nil && failed
}

// errVanished is the error of a connection whose data had ended before it was reset.
var errVanished = errors.New("the peer reset the connection after the end of its data")

// A pair is a client's connection and the host's, joined. Two goroutines copy its directions, and
// nothing else is kept for it.
type pair struct {
	client, host *net.TCPConn
	running      atomic.Int32 // directions
	abort        func()       // resets both connections; may be called any number of times
	done         func(err error)
	err          atomic.Pointer[error] // of the direction that failed first
}

// join copies in both directions until one has ended, and a goroutine goes on with the other one. If one of
// the connections fails, the other one is reset. What was read from the client before is sent first. done is
// called when both connections are closed, with the error of the one that failed.
func (s *Server) join(client *net.TCPConn, t target, c *counts, done func(err error)) {
	host := t.conn
	p := &pair{client: client, host: host, done: done}
	p.abort = sync.OnceFunc(func() {
		reset(client)
		reset(host)
	})
	up, err := s.newDirection(client, host, &c.sent)
	down, downErr := s.newDirection(host, client, &c.received)
	if err = errors.Join(err, downErr); err == nil && len(t.first) > 0 {
		var n int
		n, err = host.Write(t.first)
		c.sent.Add(int64(n))
	}
	if err != nil {
		p.abort()
		done(err)
		return
	}
	p.running.Store(2)
	s.running.Go(func() { p.copy(up) })
	p.copy(down) // here, because in many protocols the server speaks first
}

// copy runs one direction to its end, and closes the connections at the end of both.
func (p *pair) copy(d *direction) {
	err := d.run()
	if err != nil {
		p.fail(err)
	}
	if p.running.Add(-1) == 0 {
		p.end()
		return
	}
	// The other direction may be idle for ever, so it would not notice that this peer is gone.
	if err == nil && wasReset(d.fromRaw) {
		p.fail(errVanished)
	}
}

// fail resets both connections.
func (p *pair) fail(err error) {
	p.err.CompareAndSwap(nil, &err)
	p.abort()
}

// end closes both connections, which have sent all and received all unless one failed.
func (p *pair) end() {
	_, _ = p.client.Close(), p.host.Close() // a connection that was reset is closed
	var err error
	if first := p.err.Load(); first != nil {
		err = *first
	}
	p.done(err)
}
