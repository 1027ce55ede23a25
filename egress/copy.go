package egress

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/connlimit"
)

const (
	// bufferSize is how many bytes a direction reads at a time.
	bufferSize = 32 << 10
	// A direction rests after readsAtOnce reads, if there is always more. A goroutine that always finds data to copy never
	// waits, and Go then looks at the network only every 10 ms, so queries would wait. A rest takes about 1 ms; data gathers
	// meanwhile.
	readsAtOnce, rest = 16, 20 * time.Microsecond
)

// newBuffer returns a buffer for the pool of a server.
func newBuffer() any { return new([bufferSize]byte) }

// A conn joins a client's connection with the connection to its host.
type conn struct {
	net.Conn // that of the client, for connlimit

	client, host     *net.TCPConn
	place            *connlimit.Place
	cancel           context.CancelCauseFunc // ends what happens before the connection is joined
	joined           atomic.Bool             // host is set, and both directions are copied
	toHost, toClient direction
	counts           *counts
	aborted          atomic.Bool
}

// A direction copies from one connection to the other one.
type direction struct {
	from, to *net.TCPConn
	copied   [2]*atomic.Int64 // bytes of the name, and of all names
	reading  atomic.Bool      // waits for the source, so a reset wakes it
	ended    atomic.Bool      // the source has ended its data, and all writes to the destination have succeeded
}

// join records the connection to the host. The bytes are counted in n. While no data comes, the kernel probes both peers every
// 15 s, as is usual in Go, so a peer that has vanished is noticed. Without probes, connection tracking would forget a
// connection after 60 s if its data has ended in one direction (nf_conntrack_tcp_timeout_close_wait). Then the rules would no
// longer translate its addresses, and data from the host would not reach the client.
func (c *conn) join(host *net.TCPConn, n *counts) {
	_ = c.client.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true}) // if it fails, the idle timeout still closes the connection
	c.host, c.counts = host, n
	c.toHost.from, c.toHost.to, c.toHost.copied = c.client, host, [2]*atomic.Int64{&n.sent, &n.all.sent}
	c.toClient.from, c.toClient.to, c.toClient.copied = host, c.client, [2]*atomic.Int64{&n.received, &n.all.received}
	c.place.Serve()
	c.joined.Store(true)
}

// Close aborts the connection, to make room for another one.
func (c *conn) Close() error {
	c.abort(errRoom)
	return nil
}

// halfClosed reports whether data has ended in a direction.
func (c *conn) halfClosed() bool { return c.toHost.ended.Load() || c.toClient.ended.Load() }

// abort ends the connection: with resets, or, before it is joined, with a refusal because of cause. It returns false if it
// was called before.
func (c *conn) abort(cause error) bool {
	if !c.aborted.CompareAndSwap(false, true) {
		return false
	}
	c.cancel(cause)
	if c.joined.Load() {
		reset(c.client)
		reset(c.host)
	} else {
		stopReading(c.client)
	}
	return true
}

// reset closes a connection with a reset, which discards data that was not sent.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0) // fails only on a closed connection
	_ = conn.Close()
}

// stopReading makes reads of a connection fail.
func stopReading(conn *net.TCPConn) { _ = conn.SetReadDeadline(time.Unix(1, 0)) }

// copy copies in both directions until both have ended, and closes both connections. The function first returns the first
// bytes for the host, or a refusal, which copy returns; it may be nil. If a connection fails, the other one is reset.
func (c *conn) copy(buffers *sync.Pool, first func() ([]byte, error)) error {
	var toHost, toClient error
	var running sync.WaitGroup
	running.Go(func() { toHost = c.run(buffers, &c.toHost, &c.toClient, first) })
	toClient = c.run(buffers, &c.toClient, &c.toHost, nil)
	running.Wait()
	if toHost != nil || toClient != nil {
		c.abort(nil)
	}
	_, _ = c.client.Close(), c.host.Close()
	if refused, is := errors.AsType[*refusal](toHost); is {
		return refused
	}
	return nil
}

// run runs direction d to its end. other is the opposite direction. The error is nil if the source has ended its data.
func (c *conn) run(buffers *sync.Pool, d, other *direction, first func() ([]byte, error)) error {
	var begun []byte
	var readErr, writeErr error
	if first != nil {
		begun, readErr = first()
	}
	if readErr == nil {
		readErr, writeErr = c.move(buffers, d, begun)
	}
	c.place.Serve()
	switch {
	case errors.Is(readErr, os.ErrDeadlineExceeded) && other.ended.Load():
		return nil // the destination has reset its connection after the end of its data
	case readErr != nil:
		c.abort(readErr)
		return readErr
	case errors.Is(writeErr, unix.EPIPE):
		return nil // the destination had ended its data before its reset
	case writeErr != nil:
		return writeErr // the other direction first moves what the destination sent before its reset
	}
	// The kernel reports a reset once. Before the end of the data a read would get the error, unless a write has got it.
	state := pollConn(d.from)
	if other.ended.Load() || state&unix.POLLHUP == 0 || state&unix.POLLERR != 0 {
		d.ended.Store(true)
		_ = d.to.CloseWrite() // if it fails, the destination has reset its connection: the other direction finds out
	}
	if state&unix.POLLHUP != 0 { // the source has reset its connection, so the other direction can only end
		stopReading(other.from)
	}
	return nil
}

// move copies until the source has ended its data, or one of the connections has failed. While it waits for the source,
// it holds no buffer, as io.Copy would.
func (c *conn) move(buffers *sync.Pool, d *direction, first []byte) (readErr, writeErr error) {
	raw, err := d.from.SyscallConn()
	if err != nil {
		return err, nil
	}
	var buffer *[bufferSize]byte
	n, m := 0, 0
	read := func(fd uintptr) bool {
		buffer = buffers.Get().(*[bufferSize]byte)                                //nolint:forcetypeassert // the pool has nothing else
		if n, err = unix.Read(int(fd), buffer[:]); !errors.Is(err, unix.EAGAIN) { //nolint:gosec // a descriptor
			return true
		}
		buffers.Put(buffer)
		return false
	}
	if len(first) > 0 {
		m, writeErr = d.to.Write(first)
	}
	for reads := 1; ; reads++ {
		c.place.Serve()
		for _, sum := range d.copied {
			sum.Add(int64(m))
		}
		if writeErr != nil {
			return nil, writeErr
		}
		if n == bufferSize && reads%readsAtOnce == 0 {
			time.Sleep(rest)
		}
		d.reading.Store(true)
		readErr = raw.Read(read)
		d.reading.Store(false)
		if readErr != nil {
			return readErr, nil
		}
		if n > 0 {
			m, writeErr = d.to.Write(buffer[:n])
		}
		buffers.Put(buffer)
		if n <= 0 {
			return err, nil // nil at the end of the data
		}
	}
}

// pollConn returns POLLOUT if the connection has room for data, POLLERR if the peer has reset the connection and no call has
// returned the error yet, and POLLHUP if no more data can come or be sent.
func pollConn(conn *net.TCPConn) int16 {
	var poll [1]unix.PollFd
	if raw, err := conn.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { // fails on a closed connection
			poll[0].Fd, poll[0].Events = int32(fd), unix.POLLOUT //nolint:gosec // a descriptor
			_, _ = unix.Poll(poll[:], 0)
		})
	}
	return poll[0].Revents
}

// isGone reports whether the client has reset its connection, and nothing waits for it that would notice.
func (c *conn) isGone() bool { return !c.toHost.reading.Load() && pollConn(c.client)&unix.POLLERR != 0 }
