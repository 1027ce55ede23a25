package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrPermission is the error without CAP_NET_ADMIN in the user namespace that owns
// the network namespace.
var ErrPermission = fmt.Errorf("connection tracking cannot be queried, CAP_NET_ADMIN is missing: %w", os.ErrPermission)

// ErrUnsupported is the error while the kernel has no netlink interface to connection
// tracking: its module is not loaded.
var ErrUnsupported = fmt.Errorf("connection tracking cannot be queried, the module nf_conntrack_netlink is missing: %w", errors.ErrUnsupported)

const (
	// lookupBuffer holds any entry: one has about 40 attributes of at most 128 bytes each.
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
	idle   chan *Conn    // those that no lookup uses
	closed chan struct{} // closed by Close
	once   sync.Once
}

// OpenUDP opens sockets to the connection tracking of the calling thread's network
// namespace. It makes a first lookup, so that it fails if every lookup would. After
// [ErrPermission] and [ErrUnsupported] something is missing; any other error may be
// temporary. The caller closes it.
func OpenUDP() (*UDP, error) {
	u := &UDP{size: min(max(2, runtime.GOMAXPROCS(0)), maxLookups), closed: make(chan struct{})}
	u.idle = make(chan *Conn, u.size)
	for n := range u.size {
		c, err := open(unix.SOCK_NONBLOCK, lookupBuffer)
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

// Close closes the sockets when no lookup uses them. From then on lookups fail with
// [os.ErrClosed].
func (u *UDP) Close() error {
	u.once.Do(func() {
		close(u.closed)
		for range u.size {
			(<-u.idle).Close()
		}
	})
	return nil
}

// Lookup returns the original destination of a packet that came from client to the socket
// at local. It returns false, and no error, for a packet that was not captured: connection
// tracking has no entry (any more), the packet was sent to local, or a reply has made the entry,
// because it was sent after the packet's own entry was dropped. Local is the address
// that the packet had when it arrived, never the wildcard. A link-local IPv6 address has no
// zone: the kernel does not say which interface was meant.
//
// After [ErrPermission] and [ErrUnsupported] every lookup fails. Any other error may be
// temporary; a few attempts were made already.
func (u *UDP) Lookup(client, local netip.AddrPort) (netip.AddrPort, bool, error) {
	client, local = plain(client), plain(local)
	if !client.IsValid() || client.Addr().Is4() != local.Addr().Is4() {
		return netip.AddrPort{}, false, fmt.Errorf("querying connection tracking: client %q and local address %q: want two of one family",
			client, local)
	}
	original, err := u.lookup(client, local)
	switch {
	case errors.Is(err, unix.ENOENT), err == nil && (original == local || original == client):
		return netip.AddrPort{}, false, nil // to the client: a reply without a query made the entry
	case err != nil:
		return netip.AddrPort{}, false, fmt.Errorf("querying connection tracking: %w", err)
	}
	return original, true, nil
}

// lookup is [Conn.lookup] on an idle socket, repeated after temporary errors.
func (u *UDP) lookup(client, local netip.AddrPort) (netip.AddrPort, error) {
	select {
	case <-u.closed: // first, since there may still be idle sockets
		return netip.AddrPort{}, os.ErrClosed
	default:
	}
	select {
	case c := <-u.idle:
		defer func() { u.idle <- c }()
		for attempt := 1; ; attempt++ {
			original, err := c.lookup(client, local)
			err = classify(err)
			if attempt == lookupAttempts || !temporary(err) {
				return original, err
			}
		}
	case <-u.closed:
		return netip.AddrPort{}, os.ErrClosed
	}
}

// classify returns [ErrPermission] or [ErrUnsupported] for the errors that mean it, and
// others as they are.
func classify(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return ErrPermission
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return ErrUnsupported // nfnetlink_rcv_msg returns EINVAL, socket(2) the others
	}
	return err
}

// temporary reports whether a lookup that failed with err may succeed when it is repeated.
func temporary(err error) bool {
	return err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, ErrPermission) && !errors.Is(err, ErrUnsupported)
}

// lookup gets the entry whose reply goes from local to client, and returns its original
// destination. It does not block: the kernel has written the reply when write returns.
func (c *Conn) lookup(client, local netip.AddrPort) (netip.AddrPort, error) {
	c.seq++
	request := appendLookup(c.buffer[:0], c.seq, local, client)
	if _, err := unix.Write(c.fd, request); err != nil { // without an address it goes to the kernel
		return netip.AddrPort{}, err
	}
	for {
		n, err := unix.Read(c.fd, c.buffer)
		if err != nil {
			return netip.AddrPort{}, err
		}
		original, matched, err := parseLookup(c.buffer[:n], c.seq)
		if matched { // others are left over from a lookup that failed
			return original, err
		}
	}
}

// appendLookup appends the request for the entry whose reply goes from src to dst, which
// are of one family.
func appendLookup(b []byte, seq uint32, src, dst netip.AddrPort) []byte {
	start := len(b)
	family, srcKind, dstKind := byte(unix.AF_INET), uint16(ip4Src), uint16(ip4Dst)
	if src.Addr().Is6() {
		family, srcKind, dstKind = unix.AF_INET6, ip6Src, ip6Dst
	}
	b = appendHeader(b, seq, Request{Type: messageGet, Family: family})
	b = appendNested(b, entryReply, func(b []byte) []byte {
		b = appendNested(b, tupleIP, func(b []byte) []byte {
			b = AppendAttribute(b, srcKind, src.Addr().AsSlice())
			return AppendAttribute(b, dstKind, dst.Addr().AsSlice())
		})
		return appendNested(b, tupleProto, func(b []byte) []byte {
			b = AppendAttribute(b, protoNumber, []byte{unix.IPPROTO_UDP})
			b = AppendAttribute(b, protoSrc, binary.BigEndian.AppendUint16(nil, src.Port()))
			return AppendAttribute(b, protoDst, binary.BigEndian.AppendUint16(nil, dst.Port()))
		})
	})
	setLength(b[start:])
	return b
}

// parseLookup returns the original destination of the entry in a reply, or the error in
// it. Matched is false for the reply to another request than that with the number seq.
func parseLookup(b []byte, seq uint32) (original netip.AddrPort, matched bool, err error) {
	m, _, err := nextMessage(b)
	switch {
	case err != nil:
		return original, true, err
	case m.seq != seq:
		return original, false, nil
	case m.kind == unix.NLMSG_ERROR && m.err() != nil:
		return original, true, m.err()
	case m.kind != messageNew: // also an acknowledgement, which was not requested
		return original, true, errMalformed
	}
	original = parseDestination(FindAttribute(m.attributes(), entryOriginal))
	if !original.IsValid() || original.Port() == 0 {
		return netip.AddrPort{}, true, errMalformed
	}
	return original, true, nil
}
