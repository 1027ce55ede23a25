// Package intake counts the bytes of requests that have arrived, and that no handler has read. gRPC has no bound for them:
// it keeps a message that is half received, of up to 1 MiB, and takes a hundred bytes more for each frame, and a client may
// send each byte in a frame of its own. If all clients have sent too many bytes, package connlimit closes a connection.
//
// It also ends a connection that has begun too many streams.
package intake

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"github.com/nametap/nametap/internal/connlimit"
)

// frameCost is how many bytes gRPC needs for a frame besides its content: a client may send each byte in a frame of its
// own.
const frameCost = 128

// maxStreams bounds the streams that a connection begins. An agent begins one, and after an error another one after a pause of
// up to 30 s, and connects again within half an hour. A client that begins streams and resets them at once (CVE-2023-44487)
// would otherwise cost a processor, and no bound of gRPC counts them.
const maxStreams = 100

var errStreams = fmt.Errorf("the client has begun more than %d streams", maxStreams)

// Credentials returns credentials like inner. A server that uses them counts the bytes of requests that have arrived but
// were not read yet, and that the place of a connection holds. Place returns the place of an accepted connection.
func Credentials(inner credentials.TransportCredentials, place func(net.Conn) *connlimit.Place) credentials.TransportCredentials {
	return counting{inner, place}
}

// counting are credentials of connections that are counted.
type counting struct {
	credentials.TransportCredentials
	place func(net.Conn) *connlimit.Place
}

// ServerHandshake does the handshake, and returns a connection that is counted.
func (c counting) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	inner, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	return &Connection{Conn: inner, place: c.place(raw), frames: newFrames()}, info, nil
}

// Clone returns a copy.
func (c counting) Clone() credentials.TransportCredentials {
	return counting{c.TransportCredentials.Clone(), c.place}
}

// AddressOf returns the IP address of a network address; the zero Addr if it has none.
func AddressOf(a net.Addr) netip.Addr {
	if tcp, ok := a.(*net.TCPAddr); ok {
		return tcp.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// A Connection is a connection whose unread requests are counted. Its methods are safe for concurrent use.
type Connection struct {
	net.Conn
	place  *connlimit.Place
	frames frames // for the goroutine that reads

	mu        sync.Mutex
	unread    int  // bytes that no handler has read, also of streams that have ended
	held      int  // bytes that the place holds
	closed    bool // it is closed, and holds nothing any more
	begun     bool // it has had a stream
	handlers  int  // handlers of streams
	receiving int  // handlers that wait for a request
}

// Place returns the place of the connection.
func (c *Connection) Place() *connlimit.Place { return c.place }

// Read reads, and counts what it has read. The error about too many streams makes gRPC close the connection.
func (c *Connection) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if count, data := c.frames.read(p[:n]); count > 0 || data != 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.changeLocked(data, data+count*frameCost)
	}
	if c.frames.streams > maxStreams {
		return 0, errStreams
	}
	return n, err
}

// Close gives back all bytes, and closes the connection.
func (c *Connection) Close() error {
	c.mu.Lock()
	c.changeLocked(0, -c.held)
	c.closed = true
	c.mu.Unlock()
	return c.Conn.Close()
}

// changeLocked adds to the bytes that are unread and held, unless the connection is closed. The client is
// awaited while it has no handler, or while all its handlers wait for the rest of a request.
func (c *Connection) changeLocked(unread, held int) {
	if c.closed {
		return
	}
	c.unread, c.held = c.unread+unread, c.held+held
	c.place.Turn(c.handlers > 0 && (c.unread <= 0 || c.receiving < c.handlers))
	c.place.Hold(int64(held))
}

// RemoteAddr returns the address of the client, by which [ConnectionOf] finds the connection of a stream.
func (c *Connection) RemoteAddr() net.Addr { return remote{c.Conn.RemoteAddr(), c} }

// remote is the address of a client.
type remote struct {
	net.Addr
	conn *Connection
}

// ConnectionOf returns the connection of the stream with a context. The server must use [Credentials].
func ConnectionOf(ctx context.Context) *Connection {
	p, _ := peer.FromContext(ctx)
	return p.Addr.(remote).conn
}

// Begin records that the handler of a stream begins, and reports whether it is the first one.
func (c *Connection) Begin() (first bool) {
	c.mu.Lock()
	first, c.begun = !c.begun, true
	c.mu.Unlock()
	c.change(1, 0, 0)
	return first
}

// End records that the handler of a stream ends.
func (c *Connection) End() { c.change(-1, 0, 0) }

// Receive calls receive, with which a handler waits for a request. From then on, the request does not count as unread.
func (c *Connection) Receive(receive func(any) error, request any) error {
	c.change(0, 1, 0)
	err, n := receive(request), 0
	if r, ok := request.(interface{ Bytes() int }); ok {
		n = r.Bytes()
	}
	c.change(0, -1, n)
	return err
}

// change adds to the numbers of handlers, and gives back what the bytes hold that a handler has read.
func (c *Connection) change(handlers, receiving, read int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handlers, c.receiving = c.handlers+handlers, c.receiving+receiving
	back := c.held
	if read < c.unread {
		back = c.held * read / c.unread
	}
	c.changeLocked(-read, -back)
}

const (
	frameHead   = 9       // bytes before each frame
	maxFrame    = 1 << 14 // bytes in a frame: gRPC accepts no longer frames
	frameLength = 3       // bytes of the length, which begins the head
	frameType   = 3       // index of the type in the head
)

// frames finds the DATA and HEADERS frames in the bytes that a client sends (RFC 9113, sections 3.4, 4.1, 6.1 and 6.2).
type frames struct {
	streams int // HEADERS frames, with each of which a client begins a stream
	skip    int // bytes until the next head
	head    [frameHead]byte
	headLen int // number of bytes in head
}

// newFrames returns the frames of a new connection.
func newFrames() frames { return frames{skip: len(http2.ClientPreface)} }

// read follows the next bytes. It returns how many DATA frames begin in them, and the size of these frames. It counts all
// bytes of a frame when the frame begins, because gRPC then makes room for the whole frame. It also counts padding, which
// clients of gRPC do not send.
func (f *frames) read(p []byte) (count, data int) {
	for len(p) > 0 {
		switch {
		case f.skip > 0:
			n := min(f.skip, len(p))
			f.skip -= n
			p = p[n:]
		default:
			n := copy(f.head[f.headLen:], p)
			f.headLen += n
			p = p[n:]
			if f.headLen < frameHead {
				break
			}
			f.headLen = 0
			length := 0
			for _, b := range f.head[:frameLength] {
				length = length<<8 | int(b)
			}
			f.skip = length
			switch http2.FrameType(f.head[frameType]) {
			case http2.FrameData:
				count, data = count+1, data+min(length, maxFrame)
			case http2.FrameHeaders:
				f.streams++
			}
		}
	}
	return count, data
}
