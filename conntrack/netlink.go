package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	netlinkHeader   = unix.SizeofNlMsghdr // length 4, type 2, flags 2, sequence 4, port 4
	netfilterHeader = 4                   // family 1, version 1, resource 2
	attributeHeader = unix.SizeofNlAttr   // length 2, type 2
	attributeType   = 0x3fff              // without the flags for nested and for network byte order
)

const (
	// exchangeWait is how long the kernel may take for one datagram.
	exchangeWait = 5 * time.Second
	// exchangeBuffer holds any datagram of a dump: the kernel makes none above 32 KiB.
	exchangeBuffer = 32 << 10
	// dumpAttempts is how often a dump is made until none of its parts was interrupted.
	dumpAttempts = 5
)

// ErrInterrupted is the error for a dump that is incomplete, since the kernel's table was
// changed in a way that made the kernel lose its place. Repeating it may succeed.
var ErrInterrupted = errors.New("the kernel's table changed while it was read")

// errMalformed is the error for a reply that differs from the kernel's documentation.
var errMalformed = errors.New("malformed reply from the kernel")

// A Conn is a socket to netfilter in the network namespace of the thread that opened it.
// Only one goroutine at a time may use it.
type Conn struct {
	fd     int
	seq    uint32 // of the last request
	buffer []byte
}

// A Request is one message to netfilter (linux/netfilter/nfnetlink.h).
type Request struct {
	Type       uint16 // subsystem<<8 | message
	Flags      uint16 // NLM_F_REQUEST is always added
	Family     uint8  // AF_INET, AF_INET6 or AF_UNSPEC
	Resource   uint16 // 0, except in the messages around a batch: the subsystem
	Attributes []byte
}

// Dial opens a Conn. The caller closes it.
func Dial() (*Conn, error) {
	c, err := open(0, exchangeBuffer)
	if err != nil {
		return nil, err
	}
	wait := unix.NsecToTimeval(int64(exchangeWait))
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		c.Close()
		return nil, os.NewSyscallError("setsockopt", err)
	}
	return c, nil
}

// open opens a socket with more flags of socket(2) and a buffer of this size.
func open(flags, size int) (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	return &Conn{fd: fd, buffer: make([]byte, size)}, nil
}

// Close closes the socket.
func (c *Conn) Close() { _ = unix.Close(c.fd) } // nothing is buffered that could be lost

// Exchange sends requests in one datagram and calls visit with the attributes of each
// reply, which are valid during the call. It returns when the last request with NLM_F_ACK
// is acknowledged, when a dump is complete, or with the first error; an error of the
// kernel is a [unix.Errno].
//
// A dump that was interrupted is repeated a few times, so visit may see an entry more than
// once. If every attempt was interrupted, Exchange returns [ErrInterrupted].
func (c *Conn) Exchange(visit func(attributes []byte), requests ...Request) error {
	for attempt := 1; ; attempt++ {
		err := c.exchange(visit, requests)
		if !errors.Is(err, ErrInterrupted) || attempt == dumpAttempts {
			return err
		}
	}
}

// exchange is one attempt of Exchange.
func (c *Conn) exchange(visit func(attributes []byte), requests []Request) error {
	a := answer{first: c.seq + 1, visit: visit}
	var datagram []byte
	for _, r := range requests {
		c.seq++
		if r.Flags&unix.NLM_F_ACK != 0 {
			a.acked = c.seq
		}
		start := len(datagram)
		datagram = append(appendHeader(datagram, c.seq, r), r.Attributes...)
		setLength(datagram[start:])
	}
	a.last = c.seq
	if _, err := unix.Write(c.fd, datagram); err != nil { // without an address it goes to the kernel
		return os.NewSyscallError("write", err)
	}
	for {
		n, err := unix.Read(c.fd, c.buffer)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("no reply from the kernel within %v: %w", exchangeWait, os.ErrDeadlineExceeded)
		case err != nil:
			return os.NewSyscallError("read", err)
		}
		if done, err := a.read(c.buffer[:n]); done || err != nil {
			return err
		}
	}
}

// An answer reads the replies to the requests of one exchange.
type answer struct {
	first, last uint32 // sequence numbers of the first and the last request
	acked       uint32 // of the request whose acknowledgement ends the answer
	visit       func(attributes []byte)
	interrupted bool
}

// read reads one datagram and reports whether it completes the answer.
func (a *answer) read(datagram []byte) (done bool, err error) {
	for len(datagram) > 0 {
		m, rest, err := nextMessage(datagram)
		if err != nil {
			return true, err
		}
		datagram = rest
		if m.seq-a.first > a.last-a.first {
			continue // left over from an exchange that failed
		}
		a.interrupted = a.interrupted || m.flags&unix.NLM_F_DUMP_INTR != 0
		switch {
		case m.kind != unix.NLMSG_DONE && m.kind != unix.NLMSG_ERROR:
			a.visit(m.attributes())
		case m.err() != nil:
			return true, m.err()
		case m.kind == unix.NLMSG_DONE && a.interrupted:
			return true, ErrInterrupted
		case m.kind == unix.NLMSG_DONE || m.seq == a.acked:
			return true, nil
		}
	}
	return false, nil
}

// A message is one message from the kernel.
type message struct {
	kind, flags uint16
	seq         uint32
	body        []byte // after the netlink header
}

// nextMessage returns the first message of a datagram and what follows it.
func nextMessage(b []byte) (m message, rest []byte, err error) {
	if len(b) < netlinkHeader {
		return m, nil, errMalformed
	}
	length := binary.NativeEndian.Uint32(b)
	if length < netlinkHeader || uint64(length) > uint64(len(b)) {
		return m, nil, errMalformed
	}
	m = message{
		kind:  binary.NativeEndian.Uint16(b[4:]),
		flags: binary.NativeEndian.Uint16(b[6:]),
		seq:   binary.NativeEndian.Uint32(b[8:]),
		body:  b[netlinkHeader:length],
	}
	return m, b[min(align(int(length)), len(b)):], nil
}

// err returns the error in a message of type NLMSG_ERROR or NLMSG_DONE. It is nil for an
// acknowledgement and for the end of a dump that succeeded.
func (m message) err() error {
	switch {
	case len(m.body) >= 4:
		if code := int32(binary.NativeEndian.Uint32(m.body)); code < 0 {
			return unix.Errno(-code)
		}
	case m.kind == unix.NLMSG_ERROR:
		return errMalformed
	}
	return nil
}

// attributes returns the attributes of a message of netfilter.
func (m message) attributes() []byte { return m.body[min(netfilterHeader, len(m.body)):] }

// appendHeader appends the headers of a request, without its length.
func appendHeader(b []byte, seq uint32, r Request) []byte {
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = binary.NativeEndian.AppendUint16(b, r.Type)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|r.Flags)
	b = binary.NativeEndian.AppendUint32(b, seq)
	b = binary.NativeEndian.AppendUint32(b, 0)
	b = append(b, r.Family, unix.NFNETLINK_V0)
	return binary.BigEndian.AppendUint16(b, r.Resource)
}

// setLength writes the length of a message into its header.
func setLength(message []byte) {
	binary.NativeEndian.PutUint32(message, uint32(len(message)))
}

// AppendAttribute appends one attribute and pads it to a multiple of 4 bytes.
func AppendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(attributeHeader+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, align(len(value))-len(value))...)
}

// appendNested appends an attribute whose value is what fill appends.
func appendNested(b []byte, kind uint16, fill func([]byte) []byte) []byte {
	start := len(b)
	b = fill(AppendAttribute(b, kind|unix.NLA_F_NESTED, nil))
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// FindAttribute returns the value of the first attribute of a kind. It returns nil if b has
// none, or is malformed before it.
func FindAttribute(b []byte, kind uint16) []byte {
	for len(b) >= attributeHeader {
		length := int(binary.NativeEndian.Uint16(b))
		if length < attributeHeader || length > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&attributeType == kind {
			return b[attributeHeader:length]
		}
		b = b[min(align(length), len(b)):]
	}
	return nil
}

// align returns n, rounded up to a multiple of 4.
func align(n int) int { return (n + 3) &^ 3 }
