package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	netfilterHeader = nl.SizeofNfgenmsg // bytes: 1 family, 1 version, 2 resource
	attributeHeader = unix.SizeofNlAttr // bytes: 2 length, 2 type
	attributeType   = nl.NLA_TYPE_MASK  // the bits of the type, without the flags for nested and for network byte order
)

// The library (in version 1.3.1) finds out the byte order at its first use, without a lock. So it is first used
// here, before any goroutine starts.
var _ = nl.NativeEndian()

const (
	// exchangeWait is how long the kernel may take for one datagram.
	exchangeWait = 5 * time.Second
	// dumpAttempts is how often a dump is tried if it is interrupted each time.
	dumpAttempts = 5
)

// A Conn is a socket to netfilter in the network namespace of the thread that opened it.
// Only one goroutine at a time may use it.
type Conn struct{ handle nl.SocketHandle }

// A Request is one message to netfilter (linux/netfilter/nfnetlink.h).
type Request struct {
	Type       uint16 // subsystem<<8 | message
	Flags      uint16 // NLM_F_REQUEST is always added
	Family     uint8  // AF_INET, AF_INET6 or AF_UNSPEC
	Resource   uint16 // the subsystem in NFNL_MSG_BATCH_BEGIN and NFNL_MSG_BATCH_END, otherwise 0
	Attributes []byte // as [nl.RtAttr] serializes them
}

// message returns the request as the library sends it.
func (r Request) message() *nl.NetlinkRequest {
	m := nl.NewNetlinkRequest(int(r.Type), int(r.Flags))
	m.AddRawData([]byte{r.Family, nl.NFNETLINK_V0})
	m.AddRawData(nl.BEUint16Attr(r.Resource))
	m.AddRawData(r.Attributes)
	return m
}

// Dial opens a Conn. The caller closes it.
func Dial() (*Conn, error) {
	socket, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	timeout := unix.NsecToTimeval(int64(exchangeWait))
	return &Conn{nl.SocketHandle{Socket: socket}}, socket.SetReceiveTimeout(&timeout)
}

// Close closes the socket.
func (c *Conn) Close() { c.handle.Close() } // nothing is buffered that could be lost

// Exchange sends a request with NLM_F_ACK or NLM_F_DUMP, and calls visit with the attributes of each reply, which
// are valid during the call. It returns when the request is answered and acknowledged, when the dump is complete,
// or with the first error; an error of the kernel is a [unix.Errno].
//
// A request with neither NLM_F_ACK nor NLM_F_DUMP may time out after [exchangeWait]. Conntrack sets NLM_F_MULTI even on
// a single reply. The library then waits for an NLMSG_DONE that does not come.
//
// A dump that was interrupted is repeated a few times, so visit may see an entry more than
// once. If every attempt was interrupted, Exchange returns [nl.ErrDumpInterrupted].
func (c *Conn) Exchange(visit func(attributes []byte), r Request) error {
	return repeated(func() error {
		m := r.message()
		m.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: &c.handle}
		return noReply(m.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(body []byte) bool {
			visit(body[min(netfilterHeader, len(body)):])
			return true
		}))
	})
}

// repeated calls dump until it is not interrupted, at most dumpAttempts times.
func repeated(dump func() error) error {
	for attempt := 1; ; attempt++ {
		err := dump()
		if !errors.Is(err, nl.ErrDumpInterrupted) || attempt == dumpAttempts {
			return err
		}
	}
}

// Batch sends requests in one datagram: the kernel applies all of them or none. It returns when
// the last request with NLM_F_ACK is acknowledged, or with the first error.
func (c *Conn) Batch(requests ...Request) error {
	var datagram []byte
	var acked uint32 // the number of the last request with NLM_F_ACK
	for _, r := range requests {
		m := r.message()
		c.handle.Seq++
		m.Seq = c.handle.Seq
		if r.Flags&unix.NLM_F_ACK != 0 {
			acked = m.Seq
		}
		datagram = append(datagram, m.Serialize()...)
	}
	if err := unix.Sendto(c.handle.Socket.GetFd(), datagram, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	for {
		messages, _, err := c.handle.Socket.Receive()
		if err != nil {
			return noReply(err)
		}
		for _, m := range messages {
			if m.Header.Type != unix.NLMSG_ERROR || len(m.Data) < 4 {
				continue
			}
			if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 { //nolint:gosec // the kernel's int
				return unix.Errno(-code)
			}
			if m.Header.Seq == acked {
				return nil
			}
		}
	}
}

// noReply returns an error with a clear text if err is the library's error after [exchangeWait]. It returns other
// errors unchanged.
func noReply(err error) error {
	if errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("no reply from the kernel within %v: %w", exchangeWait, os.ErrDeadlineExceeded)
	}
	return err
}

// FindAttribute returns the value of the first attribute of a kind. It returns nil if b has no such attribute, or
// if b is malformed before the attribute.
func FindAttribute(b []byte, kind uint16) []byte {
	if found := wholeAttribute(b, kind); found != nil {
		return found[attributeHeader:binary.NativeEndian.Uint16(found)]
	}
	return nil
}

// wholeAttribute returns the same attribute as FindAttribute, with its header and its padding. The library has
// only parsers that allocate, and an entry has about 40 attributes.
func wholeAttribute(b []byte, kind uint16) []byte {
	for len(b) >= attributeHeader {
		length := int(binary.NativeEndian.Uint16(b))
		if length < attributeHeader || length > len(b) {
			return nil
		}
		padded := min((length+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(b))
		if binary.NativeEndian.Uint16(b[2:])&attributeType == kind {
			return b[:padded]
		}
		b = b[padded:]
	}
	return nil
}
