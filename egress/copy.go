package egress

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// bufferSize is the size in bytes of the buffers for directions that are not busy. A direction is
	// busy while its source has as many bytes waiting.
	bufferSize = 16 << 10
	// chunkSize is how many bytes a busy direction moves at a time, through a pipe within the kernel: the size of the
	// pipes of net. maxPipes bounds those that wait for their destination meanwhile. It is less than the number of
	// such pipes that the kernel gives a user without privileges (fs.pipe-user-pages-soft, 64).
	chunkSize = 1 << 20
	maxPipes  = 32
)

// A pair is a client's connection and the host's, joined. Two goroutines copy its directions.
type pair struct {
	server       *Server
	client, host *net.TCPConn
	up, down     direction    // from the client to the host, and back
	running      atomic.Int32 // directions
	abort        func()       // resets both connections; may be called any number of times
	half         bool         // known to have ended in one direction; of the sweep
	done         func()
	failed       atomic.Bool
}

// A direction copies from one connection to the other one.
type direction struct {
	from, to *net.TCPConn
	fromRaw  syscall.RawConn
	copied   *atomic.Int64
	ended    atomic.Bool // the destination was told the end of the data
}

// join copies in both directions until both have ended, and returns at once. If one of the connections
// fails, the other one is reset. What was read from the client before is sent first. done is called when both
// connections are closed.
func (s *Server) join(client *net.TCPConn, t target, c *counts, done func()) {
	p := &pair{server: s, client: client, host: t.conn, done: done}
	p.up.from, p.up.to, p.up.copied = client, t.conn, &c.sent
	p.down.from, p.down.to, p.down.copied = t.conn, client, &c.received
	p.abort = sync.OnceFunc(func() {
		reset(client)
		reset(t.conn)
	})
	p.running.Store(2)
	var err, downErr error
	p.up.fromRaw, err = client.SyscallConn()
	p.down.fromRaw, downErr = t.conn.SyscallConn()
	if err != nil || downErr != nil || !s.joined(client, p) {
		p.abort()
	}
	s.running.Go(func() { p.copy(&p.up, &p.down, t.first) })
	s.running.Go(func() { p.copy(&p.down, &p.up, nil) }) // not here: the stack of this goroutine has grown
}

// copy runs one direction to its end, and closes the connections at the end of both.
func (p *pair) copy(d, other *direction, first []byte) {
	err := p.move(d, first)
	if err == nil && !other.ended.Load() {
		// A reset is read as an end if a write has got the error. After the end of both directions, a connection looks the same.
		if failed := failure(d.fromRaw); !other.ended.Load() {
			err = failed
		}
	}
	if err == nil {
		d.ended.Store(true)
		if !other.ended.Load() { // else the connections are closed
			err = d.to.CloseWrite()
		}
	}
	if err != nil {
		p.failed.Store(true)
	}
	switch last := p.running.Add(-1) == 0; {
	case last:
		if p.failed.Load() {
			p.abort()
		}
		_, _ = p.client.Close(), p.host.Close() // both have sent all and received all, or were reset
		p.done()
	case err == nil:
	case !other.ended.Load() && failure(other.fromRaw) != nil:
		// The other direction passes on what the destination sent before its reset.
	default:
		p.abort()
	}
}

// move copies until the source has ended its data, or until one of the two connections has failed. While the source has
// nothing to send, it holds neither a buffer nor a pipe, as io.Copy would.
func (p *pair) move(d *direction, first []byte) error {
	n, err := d.to.Write(first)
	d.copied.Add(int64(n))
	for busy := false; err == nil; {
		if busy {
			busy, err = p.moveChunk(d)
			p.server.look.atIntervals(time.Since(p.server.began))
			continue
		}
		var buffer *[bufferSize]byte
		var n int
		var readErr error
		if err := d.fromRaw.Read(func(fd uintptr) bool {
			buffer = p.server.buffers.Get().(*[bufferSize]byte)
			n, readErr = retry(func() (int, error) { return unix.Read(int(fd), buffer[:]) }) //nolint:gosec // a descriptor
			if !errors.Is(readErr, unix.EAGAIN) {
				return true
			}
			p.server.buffers.Put(buffer)
			return false
		}); err != nil {
			return err
		}
		if n > 0 {
			n, err = d.to.Write(buffer[:n])
			d.copied.Add(int64(n))
		}
		p.server.buffers.Put(buffer)
		if n <= 0 {
			return errors.Join(readErr, err)
		}
		busy = n == bufferSize
	}
	return err
}

// moveChunk moves the bytes that wait in the source, unless these are few or there are too many pipes: then the direction
// is no longer busy.
func (p *pair) moveChunk(d *direction) (busy bool, err error) {
	waiting := 0
	if err := d.fromRaw.Control(func(fd uintptr) {
		waiting, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) //nolint:gosec // a descriptor; 0 after an error
	}); err != nil {
		return false, err
	}
	if waiting < bufferSize || !p.server.pipes.TryAcquire(1) {
		return false, nil
	}
	defer p.server.pipes.Release(1)
	n, err := d.to.ReadFrom(&io.LimitedReader{R: d.from, N: int64(min(waiting, chunkSize))})
	d.copied.Add(n)
	return true, err
}

// retry calls call until it is not interrupted by a signal.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
