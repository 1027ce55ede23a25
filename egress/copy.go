package egress

import (
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// bufferSize is how many bytes a direction reads at a time, unless it is busy. A direction is busy if its last
	// read had bufferSize bytes or more.
	bufferSize = 16 << 10
	// chunkSize is how many bytes a direction moves before another connection has its turn. A busy direction moves a
	// whole chunk at once, through a pipe of this size within the kernel. With larger chunks, copying takes less
	// processor time, but queries wait longer, because the kernel does not interrupt a system call that copies.
	// maxPipes bounds the number of pipes.
	chunkSize = 128 << 10
	maxPipes  = 32
)

// A copier copies the data of connections. It belongs to a loop.
type copier struct {
	*loop

	buffer    [bufferSize]byte
	pipes     []*pipe // empty pipes, to be used again
	pipeCount int     // number of pipes that exist
}

// A pipe is a pipe within the kernel.
type pipe struct {
	r, w     int
	buffered int // bytes in the pipe
}

// takePipe returns an empty pipe, or nil if there are too many or none can be made.
func (c *copier) takePipe() *pipe {
	if last := len(c.pipes) - 1; last >= 0 {
		p := c.pipes[last]
		c.pipes = c.pipes[:last]
		return p
	}
	var ends [2]int
	if c.pipeCount == maxPipes || unix.Pipe2(ends[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	c.pipeCount++
	_, _ = unix.FcntlInt(uintptr(ends[1]), unix.F_SETPIPE_SZ, chunkSize) // if it fails, the pipe is smaller and slower
	return &pipe{r: ends[0], w: ends[1]}
}

// returnPipe takes a pipe back, and closes it if it is not empty.
func (c *copier) returnPipe(p *pipe) {
	if p.buffered == 0 {
		c.pipes = append(c.pipes, p)
		return
	}
	c.pipeCount--
	_, _ = unix.Close(p.r), unix.Close(p.w)
}

// closePipes closes the empty pipes.
func (c *copier) closePipes() {
	for _, p := range c.pipes {
		_, _ = unix.Close(p.r), unix.Close(p.w)
	}
}

// A pair joins a client's connection with the connection to the host.
type pair struct {
	*copier

	client, host     *socket
	toHost, toClient direction
	last             time.Time     // when data was last moved, or a direction ended
	probes           time.Duration // after how much time without data the kernel probes the peers; 0 if it does not
	queued           bool          // moveQueued is among the functions in loop.deferred
	failed           bool          // the end of the pair resets both connections
	closed           bool
	done             func() // called after both connections were closed
}

// A direction copies from one connection to the other one.
type direction struct {
	from, to *socket
	copied   *atomic.Int64
	rest     []byte // bytes that were read and not yet written; at first, the bytes that were read for the name
	pipe     *pipe  // holds bytes that were read and not yet written; nil without any
	busy     bool
	atEOF    bool // the source has ended its data, without a reset
	finished bool // the direction has ended or failed
}

// newPair returns a pair whose bytes are counted in n. The caller then calls move. From that call on, the pair
// copies in both directions until both have ended. If one connection fails, the other one is reset.
func (c *copier) newPair(client, host *socket, n *counts) *pair {
	p := &pair{copier: c, client: client, host: host, last: c.now}
	p.toHost = direction{from: client, to: host, copied: &n.sent}
	p.toClient = direction{from: host, to: client, copied: &n.received}
	client.handle, host.handle = p.move, p.move
	return p
}

// move moves what can be moved, at most one chunk in each direction.
func (p *pair) move() {
	more := p.run(&p.toHost, &p.toClient)
	more = p.run(&p.toClient, &p.toHost) || more
	switch {
	case p.toHost.finished && p.toClient.finished:
	case more && !p.queued:
		p.queued = true
		p.deferred = append(p.deferred, p.moveQueued)
	case more:
	case p.client.failed && !p.toClient.finished, p.host.failed && p.toClient.finished:
		// The client first gets what the host sent before its reset.
		p.abort()
	}
}

// moveQueued calls move when it is the pair's turn again.
func (p *pair) moveQueued() {
	p.queued = false
	p.move()
}

// run moves up to a chunk in direction d. It reports whether there may be more to move. other is the opposite
// direction.
func (p *pair) run(d, other *direction) (more bool) {
	for left := chunkSize; !d.finished; {
		n, err := p.moveSome(d)
		left -= n
		if n > 0 {
			p.last = p.now
		}
		switch {
		case errors.Is(err, unix.EAGAIN):
			return false
		case err != nil:
			p.end(d, other, err)
		case left <= 0:
			return true
		}
	}
	return false
}

// end ends direction d because of err. At io.EOF it also ends the data to the destination. After another error it
// resets both connections, unless the other direction still has to move what the destination sent.
func (p *pair) end(d, other *direction, err error) {
	d.finished, p.last = true, p.now
	if errors.Is(err, io.EOF) && !d.from.failed { // a read returns EOF after a write has returned the error of a reset
		d.atEOF = true
		err = nil
		if !other.finished {
			if err = unix.Shutdown(d.to.fd, unix.SHUT_WR); err != nil {
				d.to.failed = true
			}
		}
	}
	p.failed = p.failed || err != nil
	switch {
	case other.finished:
		p.close()
	case err != nil && d.to.failed && !d.from.failed:
		// The other direction moves what the destination sent before its reset.
	case err != nil:
		p.abort()
	}
}

// abort resets both connections. If they are closed already, it does nothing.
func (p *pair) abort() {
	if p.closed {
		return
	}
	p.failed, p.toHost.finished, p.toClient.finished = true, true, true
	p.close()
}

// close closes both connections after both directions are over, with a reset if one of them has failed.
func (p *pair) close() {
	end := p.loop.close
	if p.failed {
		end = p.reset
	}
	end(p.client)
	end(p.host)
	for _, d := range []*direction{&p.toHost, &p.toClient} {
		if d.pipe != nil {
			p.returnPipe(d.pipe)
			d.pipe = nil
		}
	}
	p.closed = true
	p.done()
}

// moveSome moves some bytes in direction d. The error is EAGAIN if the source has none, or the destination has no
// room.
func (p *pair) moveSome(d *direction) (n int, err error) {
	switch {
	case !d.to.writable:
		return 0, unix.EAGAIN
	case len(d.rest) > 0:
		n, err = p.write(d, d.rest)
		if d.rest = d.rest[n:]; len(d.rest) == 0 {
			d.rest = nil // frees its memory
		}
		return n, err
	case d.pipe != nil:
		return p.emptyPipe(d)
	case !d.from.readable:
		return 0, unix.EAGAIN
	case d.busy:
		return p.fillPipe(d)
	}
	n, err = p.read(d, func() (int, error) { return unix.Read(d.from.fd, p.buffer[:]) })
	if err != nil {
		return 0, err
	}
	d.busy = n == bufferSize
	d.from.readable = d.busy || d.from.ending || d.from.urgent // a shorter read has read everything
	written, err := p.write(d, p.buffer[:n])
	if d.rest = nil; written < n && (err == nil || errors.Is(err, unix.EAGAIN)) {
		d.rest = slices.Clone(p.buffer[written:n])
	}
	return written, err
}

// read calls f, which reads from the source. The error is EOF at the end of the data.
func (p *pair) read(d *direction, f func() (int, error)) (int, error) {
	n, err := retry(f)
	switch {
	case errors.Is(err, unix.EAGAIN):
		d.from.readable = false
	case err != nil:
		d.from.failed = true
	case n == 0:
		return 0, io.EOF
	}
	return n, err
}

// write writes to the destination.
func (p *pair) write(d *direction, b []byte) (int, error) {
	return p.tryWrite(d, func() (int, error) { return unix.Write(d.to.fd, b) })
}

// tryWrite calls f, which writes to the destination.
func (p *pair) tryWrite(d *direction, f func() (int, error)) (int, error) {
	n, err := retry(f)
	n = max(n, 0)
	switch {
	case errors.Is(err, unix.EAGAIN):
		p.setFull(d.to)
	case err != nil:
		d.to.failed = true
	}
	d.copied.Add(int64(n))
	return n, err
}

// fillPipe moves a chunk from the source to a pipe, and from there to the destination.
func (p *pair) fillPipe(d *direction) (n int, err error) {
	pipe := p.takePipe()
	if pipe == nil {
		d.busy = false
		return 0, nil
	}
	pipe.buffered, err = retry(func() (int, error) { return splice(d.from.fd, pipe.w, chunkSize) })
	if err != nil || pipe.buffered == 0 {
		pipe.buffered, d.busy = 0, false
		p.returnPipe(pipe)
		if err != nil && !errors.Is(err, unix.EAGAIN) { // the kernel reports the error of a connection only once
			d.from.failed = true
			return 0, err
		}
		return 0, nil // a read(2) follows and finds the reason: before urgent data, splice(2) returns 0 or EAGAIN
	}
	d.busy = pipe.buffered >= bufferSize
	d.pipe = pipe
	return p.emptyPipe(d)
}

// emptyPipe moves what a pipe holds to the destination.
func (p *pair) emptyPipe(d *direction) (int, error) {
	n, err := p.tryWrite(d, func() (int, error) { return splice(d.pipe.r, d.to.fd, d.pipe.buffered) })
	if d.pipe.buffered -= n; d.pipe.buffered == 0 {
		p.returnPipe(d.pipe)
		d.pipe = nil
	}
	return n, err
}

// splice moves up to n bytes between two descriptors, one of which is the end of a pipe.
func splice(from, to, n int) (int, error) {
	moved, err := unix.Splice(from, nil, to, nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	return int(moved), err
}

// probe sets the time without data after which the kernel probes both peers. A peer that has vanished is noticed
// after about five minutes. Once data has ended in one direction, the kernel probes more often, because connection
// tracking forgets such a connection after 60 s without a packet (nf_conntrack_tcp_timeout_close_wait). After that,
// the rules would no longer translate the connection's addresses, and data from the host would not reach the client.
func (p *pair) probe() {
	const interval, count = 20 * time.Second, 6
	idle := 3 * time.Minute
	if p.toHost.atEOF || p.toClient.atEOF {
		idle = interval
	}
	if p.probes == idle {
		return
	}
	p.probes = idle
	for _, s := range []*socket{p.client, p.host} {
		for _, o := range [][3]int{
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(idle.Seconds())},
			{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int(interval.Seconds())}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, count},
		} {
			_ = unix.SetsockoptInt(s.fd, o[0], o[1], o[2]) // if it fails, the idle timeout still closes the connection
		}
	}
}
