package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrPermission is the error if this process lacks CAP_NET_ADMIN in the user namespace
// that owns the network namespace.
var ErrPermission = fmt.Errorf("connection tracking cannot be queried, CAP_NET_ADMIN is missing: %w", os.ErrPermission)

// ErrUnsupported is the error while the kernel has no netlink interface to connection
// tracking: its module is not loaded.
var ErrUnsupported = fmt.Errorf("connection tracking cannot be queried, the module nf_conntrack_netlink is missing: %w", errors.ErrUnsupported)

const (
	// lookupBuffer holds any entry: an entry has about 40 attributes of at most 128 bytes each.
	lookupBuffer = 8 << 10
	// lookupAttempts is how often a lookup is tried while it fails for a temporary reason.
	lookupAttempts = 3
	// maxLookups is how many lookups run at a time, if there are as many processors.
	maxLookups = 8
)

// UDP looks up the original destinations of captured UDP packets. Its methods may be
// called from any goroutine. It has several sockets, since a lookup occupies its socket
// while the kernel works.
type UDP struct {
	size   int
	idle   chan *lookups // idle lookups
	closed chan struct{} // closed by Close
	once   sync.Once
}

// OpenUDP opens sockets to the connection tracking of the calling thread's network namespace. It makes a first
// lookup, and fails if this lookup fails. [ErrPermission] and [ErrUnsupported] mean that something is missing; any
// other error may be temporary. The caller closes the UDP.
func OpenUDP() (*UDP, error) {
	u := &UDP{size: min(max(2, runtime.GOMAXPROCS(0)), maxLookups), closed: make(chan struct{})}
	u.idle = make(chan *lookups, u.size)
	for n := range u.size {
		c, err := openLookups()
		if err != nil {
			u.size = n
			u.Close()
			return nil, fmt.Errorf("opening a netlink socket to connection tracking: %w", classify(err))
		}
		u.idle <- c
	}
	unused := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0)
	if _, _, err := u.Lookup(unused, unused); err != nil {
		u.Close()
		return nil, err
	}
	return u, nil
}

// Close closes the sockets once no lookup uses them. From then on lookups fail with [os.ErrClosed].
func (u *UDP) Close() error {
	u.once.Do(func() {
		close(u.closed)
		for range u.size {
			_ = unix.Close((<-u.idle).fd) // nothing is buffered that could be lost
		}
	})
	return nil
}

// Lookup returns the original destination of a packet that came from client to the socket at local. local is the
// destination address of the packet when it arrived, never the wildcard. A returned link-local IPv6 address has no
// zone: the kernel does not say which interface was meant.
//
// If Lookup finds no destination other than local, it returns false, and no error. There are three cases. The client
// has sent the packet to local itself. Connection tracking has no entry for the packet, or none any more. Or the entry
// of the packet was dropped, and the reply to the packet then made a new entry, in which the reply is the first packet.
//
// After [ErrPermission] and [ErrUnsupported] every lookup fails. Any other error may be
// temporary; a few attempts were made already.
func (u *UDP) Lookup(client, local netip.AddrPort) (netip.AddrPort, bool, error) {
	client, local = canonical(client), canonical(local)
	if !client.IsValid() || client.Addr().Is4() != local.Addr().Is4() {
		return netip.AddrPort{}, false, fmt.Errorf("querying connection tracking: client %q and local address %q: want two of one family",
			client, local)
	}
	original, err := u.lookup(client, local)
	switch {
	case errors.Is(err, unix.ENOENT), err == nil && (original == local || original == client):
		return netip.AddrPort{}, false, nil // a reply made the entry if its original destination is the client
	case err != nil:
		return netip.AddrPort{}, false, fmt.Errorf("querying connection tracking: %w", err)
	}
	return original, true, nil
}

// lookup calls [lookups.lookup] on an idle socket, and repeats the call after temporary errors.
func (u *UDP) lookup(client, local netip.AddrPort) (netip.AddrPort, error) {
	select {
	case <-u.closed: // checked first, because there may still be idle sockets
		return netip.AddrPort{}, os.ErrClosed
	default:
	}
	select {
	case c := <-u.idle:
		defer func() { u.idle <- c }()
		for attempt := 1; ; attempt++ {
			original, err := c.lookup(client, local)
			err = classify(err)
			certain := err == nil || errors.Is(err, unix.ENOENT) || errors.Is(err, ErrPermission) || errors.Is(err, ErrUnsupported)
			if certain || attempt == lookupAttempts {
				return original, err
			}
		}
	case <-u.closed:
		return netip.AddrPort{}, os.ErrClosed
	}
}

// classify returns [ErrPermission] or [ErrUnsupported] for an error that means the same, and any other error
// unchanged.
func classify(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return ErrPermission
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return ErrUnsupported // EINVAL comes from nfnetlink_rcv_msg, the other errors come from socket(2)
	}
	return err
}

// lookups is a socket for one lookup at a time.
type lookups struct {
	fd       int
	seq      uint32           // the number of the last request
	requests [2]lookupRequest // the requests for IPv4 and IPv6
	buffer   []byte
}

// openLookups opens a socket to the connection tracking of the calling thread's network namespace.
func openLookups() (*lookups, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	l := &lookups{fd: fd, buffer: make([]byte, lookupBuffer)}
	l.requests[0] = newLookup(unix.AF_INET, nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST, net.IPv4len)
	l.requests[1] = newLookup(unix.AF_INET6, nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST, net.IPv6len)
	return l, nil
}

// lookup gets the entry whose reply goes from local to client, and returns its original
// destination. It does not block: the kernel has written the reply when write returns.
func (l *lookups) lookup(client, local netip.AddrPort) (netip.AddrPort, error) {
	l.seq++
	request := l.requests[0]
	if local.Addr().Is6() {
		request = l.requests[1]
	}
	request.fill(l.seq, local, client)
	if _, err := unix.Write(l.fd, request.message); err != nil { // the socket has no peer, so it writes to the kernel
		return netip.AddrPort{}, err
	}
	for {
		n, err := unix.Read(l.fd, l.buffer)
		if err != nil {
			return netip.AddrPort{}, err
		}
		original, matched, err := parseLookup(l.buffer[:n], l.seq)
		if matched { // other replies are left over from a lookup that failed
			return original, err
		}
	}
}

// A lookupRequest is the request of one family for the entry whose reply goes from one address to another address.
// It is serialized once: only its number, the addresses and the ports differ between lookups.
type lookupRequest struct {
	message                          []byte
	src, dst, srcPort, dstPort, addr int // offsets of the fields in message; but addr is the length of an address
}

// newLookup returns the request of a family with unspecified addresses. src and dst are the kinds of the
// attributes, and addr is the length of an address.
func newLookup(family uint8, src, dst, addr int) lookupRequest {
	tuple := nl.NewRtAttr(nl.CTA_TUPLE_REPLY|unix.NLA_F_NESTED, nil)
	ip := tuple.AddRtAttr(nl.CTA_TUPLE_IP|unix.NLA_F_NESTED, nil)
	ip.AddRtAttr(src, make([]byte, addr))
	ip.AddRtAttr(dst, make([]byte, addr))
	protocol := tuple.AddRtAttr(nl.CTA_TUPLE_PROTO|unix.NLA_F_NESTED, nil)
	protocol.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
	protocol.AddRtAttr(nl.CTA_PROTO_SRC_PORT, nl.BEUint16Attr(0))
	protocol.AddRtAttr(nl.CTA_PROTO_DST_PORT, nl.BEUint16Attr(0))
	// The offsets are computed from the end of the message. Each attribute is padded to 4 bytes.
	m := Request{Type: messageGet, Family: family, Attributes: tuple.Serialize()}.message().Serialize()
	dstPort := len(m) - 4
	srcPort := dstPort - 4 - attributeHeader
	dstAddr := srcPort - 3*attributeHeader - 4 - addr
	return lookupRequest{message: m, src: dstAddr - attributeHeader - addr, dst: dstAddr, srcPort: srcPort, dstPort: dstPort, addr: addr}
}

// fill writes the parts of the request that differ between lookups.
func (r lookupRequest) fill(seq uint32, src, dst netip.AddrPort) {
	binary.NativeEndian.PutUint32(r.message[8:], seq)
	copy(r.message[r.src:r.src+r.addr], src.Addr().AsSlice())
	copy(r.message[r.dst:r.dst+r.addr], dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(r.message[r.srcPort:], src.Port())
	binary.BigEndian.PutUint16(r.message[r.dstPort:], dst.Port())
}

// errMalformed is the error for a reply that differs from the kernel's documentation.
var errMalformed = errors.New("malformed reply from the kernel")

// parseLookup returns the original destination of the entry in a reply, or the error in the reply. matched is false
// if the reply belongs to another request than request seq.
func parseLookup(b []byte, seq uint32) (original netip.AddrPort, matched bool, err error) {
	if len(b) < unix.SizeofNlMsghdr { // bytes: 4 length, 2 type, 2 flags, 4 sequence, 4 port
		return original, true, errMalformed
	}
	length, kind := binary.NativeEndian.Uint32(b), binary.NativeEndian.Uint16(b[4:])
	switch {
	case length < unix.SizeofNlMsghdr+netfilterHeader || uint64(length) > uint64(len(b)):
		return original, true, errMalformed
	case binary.NativeEndian.Uint32(b[8:]) != seq:
		return original, false, nil
	}
	body := b[unix.SizeofNlMsghdr:length]
	if kind == unix.NLMSG_ERROR {
		if code := int32(binary.NativeEndian.Uint32(body)); code < 0 { //nolint:gosec // the kernel's int
			return original, true, unix.Errno(-code)
		}
	}
	if kind == messageNew { // an entry; an acknowledgement was not requested
		original = parseDestination(findAttribute(body[netfilterHeader:], nl.CTA_TUPLE_ORIG))
	}
	if !original.IsValid() || original.Port() == 0 {
		return netip.AddrPort{}, true, errMalformed
	}
	return original, true, nil
}
