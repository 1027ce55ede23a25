package egress

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// bufferSize is the size in bytes of the buffers for directions that are not busy. A direction is
// busy once it fills one, and no longer when a splice moves less than that.
const bufferSize = 16 << 10

// stallCheck is how often a direction whose destination takes nothing looks whether its source was reset
// meanwhile.
const stallCheck = 5 * time.Second

// A direction copies from one connection to the other one.
type direction struct {
	from, to         *net.TCPConn
	fromRaw, toRaw   syscall.RawConn
	buffers          *sync.Pool // of *[bufferSize]byte
	pipes            *pipes
	copied           *atomic.Int64
	busy             bool
	first            []byte // was read from the source before
	buffer           *[bufferSize]byte
	pipe             pipe
	pending, written int // bytes in first, buffer or pipe, and how many of those are sent
	spliced          bool
	err              error
	unsent           bool                  // the error is of the destination
	read, write      func(fd uintptr) bool // kept, so that they are made once

	fromClient bool
	other      *direction
	ended      atomic.Bool // the destination was told the end of the data
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
	d.pending = len(d.first)
	for {
		if err := d.send(); err != nil {
			return err
		}
		if err := d.fromRaw.Read(d.read); err != nil {
			return err
		}
		switch {
		case errors.Is(d.err, io.EOF):
			return d.end()
		case d.err != nil:
			return d.err
		}
	}
}

// send sends what was read. While a host takes nothing, it notices a reset of the client. A client still gets
// what its host sent before a reset.
func (d *direction) send() error {
	err := d.toRaw.Write(d.write)
	for errors.Is(err, os.ErrDeadlineExceeded) {
		if err = d.sourceReset(); err != nil && d.fromClient {
			break
		}
		if err = d.to.SetWriteDeadline(time.Time{}); err == nil {
			err = d.toRaw.Write(d.write)
		}
	}
	d.release()
	d.unsent = d.err != nil
	return errors.Join(err, d.err)
}

// end tells the destination the end of the data.
func (d *direction) end() error {
	if err := d.sourceReset(); err != nil { // which is read as an end if a write has got the error
		return err
	}
	d.ended.Store(true)
	return d.to.CloseWrite()
}

// sourceReset returns an error if the source was reset.
func (d *direction) sourceReset() error {
	if err := socketError(d.fromRaw); err != nil {
		return err
	}
	if d.other.ended.Load() || !isClosedTCP(d.fromRaw) { // it may be closed because both directions have ended
		return nil
	}
	return errVanished
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
			n, err = retry(func() (int, error) { return unix.Write(int(fd), d.bytes()[d.written:d.pending]) }) //nolint:gosec // a descriptor
		}
		if errors.Is(err, unix.EAGAIN) {
			_ = d.to.SetWriteDeadline(time.Now().Add(stallCheck)) // fails if it is closed, as the write will
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

// bytes returns what is to be sent, unless it is in the pipe.
func (d *direction) bytes() []byte {
	if d.buffer != nil {
		return d.buffer[:]
	}
	return d.first
}

// release gives back the buffer or the pipe.
func (d *direction) release() {
	d.first = nil
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
		failed = errorOf(int(fd)) != nil //nolint:gosec // a descriptor
		return failed || closed(int(fd)) //nolint:gosec // a descriptor
	})
	return err == nil && failed
}

// socketError returns the error of a connection that was reset.
func socketError(conn syscall.RawConn) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) { err = errorOf(int(fd)) }) //nolint:gosec // a descriptor
	return errors.Join(controlErr, err)
}

// isClosedTCP reports whether a connection was reset, or has ended in both directions.
func isClosedTCP(conn syscall.RawConn) bool {
	is := false
	err := conn.Control(func(fd uintptr) { is = closed(int(fd)) }) //nolint:gosec // a descriptor
	return err != nil || is
}

// errorOf returns the pending error of a socket, and clears it.
func errorOf(fd int) error {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code != 0 {
		err = unix.Errno(code)
	}
	return err
}

// closed reports whether the state of a TCP socket is CLOSE.
func closed(fd int) bool {
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	return err != nil || info.State == unix.BPF_TCP_CLOSE
}

// errVanished is the error of a connection whose reset was not read as an error.
var errVanished = errors.New("the peer reset the connection")

// A pair is a client's connection and the host's, joined. Two goroutines copy its directions, and
// nothing else is kept for it.
type pair struct {
	client, host *net.TCPConn
	running      atomic.Int32 // directions
	abort        func()       // resets both connections; may be called any number of times
	done         func(err error)
	err          atomic.Pointer[error] // of the direction that failed first
}

// join copies in both directions until both have ended, and returns at once. If one of the connections
// fails, the other one is reset. What was read from the client before is sent first. done is called when both
// connections are closed, with the error of the one that failed.
func (s *Server) join(client *net.TCPConn, t target, c *counts, done func(err error)) {
	host := t.conn
	p := &pair{client: client, host: host, done: done}
	p.abort = sync.OnceFunc(func() {
		reset(client)
		reset(host)
	})
	up, err := s.newDirection(client, host, &c.sent)
	down, downErr := s.newDirection(host, client, &c.received)
	if err = errors.Join(err, downErr); err != nil {
		p.abort()
		done(err)
		return
	}
	up.first, up.fromClient, up.other, down.other = t.first, true, down, up
	p.running.Store(2)
	if !s.joined(client, p.abort) {
		p.abort()
	}
	s.running.Go(func() { p.copy(up) })
	s.running.Go(func() { p.copy(down) }) // not here: the stack of this goroutine has grown
}

// copy runs one direction to its end, and closes the connections at the end of both.
func (p *pair) copy(d *direction) {
	err := d.run()
	if err != nil {
		p.err.CompareAndSwap(nil, &err)
	}
	switch last := p.running.Add(-1) == 0; {
	case last:
		p.end()
	case err == nil:
		p.keepHalf()
		// The other direction may be idle for ever, so it would not notice that this peer is gone.
		if wasReset(d.fromRaw) {
			p.fail(errVanished)
		}
	case d.unsent && !d.other.ended.Load() && isClosedTCP(d.toRaw):
		// The other direction passes on what the destination sent before its reset.
	default:
		p.abort()
	}
}

// keepHalf probes the connections more often, because data has ended in one direction. Connection tracking
// forgets such a connection after 60 s without a packet (nf_conntrack_tcp_timeout_close_wait). The rules then
// no longer translate its addresses, so what the host sends does not reach the client.
func (p *pair) keepHalf() {
	often := keepAlive()
	often.Idle = often.Interval
	_, _ = p.client.SetKeepAliveConfig(often), p.host.SetKeepAliveConfig(often) // one that has failed needs none
}

// fail resets both connections.
func (p *pair) fail(err error) {
	p.err.CompareAndSwap(nil, &err)
	p.abort()
}

// end closes both connections, which have sent all and received all unless one failed.
func (p *pair) end() {
	var err error
	if first := p.err.Load(); first != nil {
		err = *first
		p.abort()
	}
	_, _ = p.client.Close(), p.host.Close() // a connection that was reset is closed
	p.done(err)
}
