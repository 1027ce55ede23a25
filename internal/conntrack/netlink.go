package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	netfilterHeader = nl.SizeofNfgenmsg // bytes: 1 family, 1 version, 2 resource
	attributeHeader = unix.SizeofNlAttr // bytes: 2 length, 2 type
	attributeType   = nl.NLA_TYPE_MASK  // the bits of the type, without the flags for nested and for network byte order
)

const (
	// exchangeWait is how long the kernel may take for one datagram.
	exchangeWait = 5 * time.Second
	// dumpAttempts is how often a dump is tried if it is interrupted each time.
	dumpAttempts = 5
)

// The library has its time limit in a variable. And (in version 1.3.1) it finds out the byte order at its first use,
// without a lock. So both are done here, before any goroutine starts.
var _ = func() binary.ByteOrder {
	nl.SocketTimeoutTv = unix.NsecToTimeval(int64(exchangeWait))
	return nl.NativeEndian()
}()

// A Request is one message to netfilter (linux/netfilter/nfnetlink.h).
type Request struct {
	Type       uint16 // subsystem<<8 | message
	Flags      uint16 // NLM_F_REQUEST is always added
	Family     uint8  // AF_INET, AF_INET6 or AF_UNSPEC
	Attributes []byte // as [nl.RtAttr] serializes them
}

// message returns the request as the library sends it.
func (r Request) message() *nl.NetlinkRequest {
	m := nl.NewNetlinkRequest(int(r.Type), int(r.Flags))
	m.AddRawData([]byte{r.Family, nl.NFNETLINK_V0, 0, 0})
	m.AddRawData(r.Attributes)
	return m
}

// Exchange sends a request with NLM_F_ACK or NLM_F_DUMP to netfilter in the network namespace of the calling thread, and
// calls visit with the attributes of each reply, which are valid during the call. It returns when the request is
// answered and acknowledged, when the dump is complete, or with the first error; an error of the kernel is a
// [unix.Errno].
//
// A request with neither NLM_F_ACK nor NLM_F_DUMP may time out after [exchangeWait]. Conntrack sets NLM_F_MULTI even on
// a single reply. The library then waits for an NLMSG_DONE that does not come.
//
// A dump that was interrupted is repeated a few times, so visit may see an entry more than
// once. If every attempt was interrupted, Exchange returns [nl.ErrDumpInterrupted].
func Exchange(visit func(attributes []byte), r Request) error {
	err := repeated(func() error {
		return r.message().ExecuteIter(unix.NETLINK_NETFILTER, 0, func(body []byte) bool {
			visit(body[min(netfilterHeader, len(body)):])
			return true
		})
	})
	if errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("no reply from the kernel within %v: %w", exchangeWait, os.ErrDeadlineExceeded)
	}
	return err
}

// Subscribe opens a netlink socket that is in groups. The caller closes it. Unlike [nl.Subscribe], it has no descriptor left
// after an error: the library closes the number of its file, which closes it again when the file is collected, and with it
// whatever has the number then.
func Subscribe(protocol int, groups ...int) (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(protocol)
	if err != nil {
		return nil, err
	}
	for _, group := range groups {
		if err := unix.SetsockoptInt(socket.GetFd(), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group); err != nil {
			socket.Close()
			return nil, os.NewSyscallError("joining a group of netlink", err)
		}
	}
	return socket, nil
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

// findAttribute returns the value of the first attribute of a kind. It returns nil if b has no such attribute, or
// if b is malformed before the attribute.
func findAttribute(b []byte, kind uint16) []byte {
	if found := wholeAttribute(b, kind); found != nil {
		return found[attributeHeader:binary.NativeEndian.Uint16(found)]
	}
	return nil
}

// wholeAttribute returns the same attribute as findAttribute, with its header and its padding. The library has
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
