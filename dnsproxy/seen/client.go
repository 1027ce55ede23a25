package seen

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/listen"
)

// Sent knows to which address a client has sent its query.
type Sent interface {
	// SentTo returns the address. If sure is false, the query may have been redirected to it.
	SentTo() (addr netip.AddrPort, sure bool)
}

// A budget bounds the time that lookups take, so that a flood of failures costs only a small part of one processor. A
// lookup by port looks at all sockets of the host, and any user may open some 100,000.
type budget struct {
	share    float64       // the part of one processor's time that lookups may use
	burst    time.Duration // the most that left can be
	left     time.Duration // how much time may be used now
	computed time.Time     // when the field left was last set
}

// open reports whether there is time left.
func (b *budget) open(now time.Time) bool {
	b.left = min(b.burst, b.left+time.Duration(float64(now.Sub(b.computed))*b.share))
	b.computed = now
	return b.left > 0
}

// clients finds the owners of clients' sockets, with sock_diag(7). This needs no capability.
type clients struct {
	finding atomic.Int64 // how many goroutines are in the method find
	mu      sync.Mutex
	fd      int // less than 0 while it is not open
	closed  bool
	seq     uint32
	request [diagSize + filterSize]byte
	buffer  []byte
	budgets [kinds]budget
}

func newClients() *clients {
	c := &clients{fd: -1}
	// On a busy machine a lookup takes up to 20 µs, so this share is enough for 2,000 failures a second.
	c.budgets[Failure] = budget{share: 0.05, burst: 100 * time.Millisecond}
	c.budgets[Odd] = budget{share: 0.003, burst: 5 * time.Millisecond}
	c.budgets[Ordinary] = budget{share: 0.02, burst: 20 * time.Millisecond} // while a reader wants the owners, and for names that are new to the guard
	return c
}

// close closes the socket. Later lookups find nothing.
func (c *clients) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed = true; c.fd >= 0 {
		_ = unix.Close(c.fd) // nothing is buffered that could be lost
		c.fd = -1
	}
}

// find returns the owner of the socket from which a query came. It waits for a few other lookups at most.
func (c *clients) find(q *Query, sent Sent) Who {
	const maxFinding = 16
	defer c.finding.Add(-1)
	if c.finding.Add(1) > maxFinding {
		return Who{skipped: true}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	b, now := &c.budgets[q.Kind], time.Now()
	if !b.open(now) {
		return Who{skipped: true}
	}
	if !c.openLocked() || !q.Client.IsValid() {
		return Who{}
	}
	runtime.LockOSThread() // whose time is measured
	defer runtime.UnlockOSThread()
	start := threadTime()
	defer func() { b.left -= threadTime() - start }()
	addr, sure := sent.SentTo()
	found := c.exactLocked(q, addr)
	if !found.Known && !sure {
		found = c.byPortLocked(q)
	}
	// The client may be elsewhere, such as in a container. A socket of this host that is bound to all addresses, and
	// has the client's port, is then not the socket of the client.
	if found.wildcard && !listen.OfThisHost(q.Client.Addr()) {
		return Who{}
	}
	return found.Who
}

// An owner is the owner of a socket that was found.
type owner struct {
	Who
	wildcard bool // the socket is bound to all addresses
}

// threadTime returns the processor time of this thread. The system call takes 0.2 µs. It is made without telling Go's
// scheduler, because this could take longer than the lookup.
func threadTime() time.Duration {
	var at unix.Timespec
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_THREAD_CPUTIME_ID, uintptr(unsafe.Pointer(&at)),
		0); errno != 0 {
		return 0
	}
	return time.Duration(at.Nano())
}

// openLocked opens the socket if it is not open. It reports whether the socket is open.
func (c *clients) openLocked() bool {
	if c.fd >= 0 || c.closed {
		return !c.closed
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return false
	}
	c.fd, c.buffer = fd, make([]byte, diagBuffer)
	return true
}

// Messages of linux/sock_diag.h and linux/inet_diag.h.
const (
	diagByFamily = 20 // SOCK_DIAG_BY_FAMILY
	diagSize     = unix.SizeofNlMsghdr + 56
	diagStates   = unix.SizeofNlMsghdr + 4
	diagID       = unix.SizeofNlMsghdr + 8
	diagReply    = 72 // struct inet_diag_msg
	// The id: two ports, two addresses, the interface and a cookie.
	idDstPort, idSrc, idDst, idInterface, idCookie = 2, 4, 20, 36, 40
	replyState, replyID, replyUID, replyInode      = 1, 4, 64, 68

	attrBytecode = 1  // INET_DIAG_REQ_BYTECODE
	attrCgroup   = 21 // INET_DIAG_CGROUP_ID
	filterSize   = unix.SizeofNlAttr + 8
	opSourcePort = 11 // INET_DIAG_BC_S_EQ

	diagBuffer = 16 << 10
	maxReads   = 8 // how many reads of one reply there are at most

	tcpListen = 10 // TCP_LISTEN
)

// beginLocked writes the header of a request for sockets of a family.
func (c *clients) beginLocked(q *Query, family uint8, flags uint16, size int) []byte {
	c.seq++
	b := c.request[:size]
	clear(b)
	order := binary.NativeEndian
	order.PutUint32(b, uint32(size)) //nolint:gosec // a constant
	order.PutUint16(b[4:], diagByFamily)
	order.PutUint16(b[6:], unix.NLM_F_REQUEST|flags)
	order.PutUint32(b[8:], c.seq)
	b[unix.SizeofNlMsghdr] = family
	b[unix.SizeofNlMsghdr+1] = unix.IPPROTO_UDP
	if q.TCP {
		b[unix.SizeofNlMsghdr+1] = unix.IPPROTO_TCP
	}
	order.PutUint32(b[diagStates:], ^uint32(0))      // all
	order.PutUint64(b[diagID+idCookie:], ^uint64(0)) // no cookie
	return b
}

// exactLocked asks for the socket with the address of the client, and the address to which the query was sent as its peer,
// or without a peer.
func (c *clients) exactLocked(q *Query, sent netip.AddrPort) owner {
	if !sent.IsValid() || sent.Addr().Is4() != q.Client.Addr().Is4() {
		return owner{}
	}
	family := uint8(unix.AF_INET)
	if q.Client.Addr().Is6() {
		family = unix.AF_INET6
	}
	b := c.beginLocked(q, family, 0, diagSize)
	src, dst := q.Client, sent
	if !q.TCP { // for UDP, the kernel wants the addresses of a packet that comes to the socket
		src, dst = sent, q.Client
	}
	id := b[diagID:]
	binary.BigEndian.PutUint16(id, src.Port())
	binary.BigEndian.PutUint16(id[idDstPort:], dst.Port())
	copy(id[idSrc:idDst], src.Addr().AsSlice())
	copy(id[idDst:idInterface], dst.Addr().AsSlice())
	return c.askLocked(q, b)
}

// byPortLocked asks for the UDP sockets with the port of the client, for an IPv4 client also for IPv6 sockets, which can
// send IPv4 packets. The kernel looks at all its sockets: 40 µs. For TCP, a millisecond, byPortLocked does nothing.
func (c *clients) byPortLocked(q *Query) owner {
	if q.TCP {
		return owner{}
	}
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		if family == unix.AF_INET && q.Client.Addr().Is6() {
			continue
		}
		b := c.beginLocked(q, family, unix.NLM_F_DUMP, diagSize+filterSize)
		order := binary.NativeEndian
		attr := b[diagSize:]
		order.PutUint16(attr, filterSize)
		order.PutUint16(attr[2:], attrBytecode)
		// One operation: its code, the step if the comparison is true, the step if it is false, and the port to
		// compare. A step beyond the end means that the socket does not match.
		attr[4], attr[5] = opSourcePort, 8
		order.PutUint16(attr[6:], 12)
		order.PutUint16(attr[10:], q.Client.Port())
		if who := c.askLocked(q, b); who.Known {
			return who
		}
	}
	return owner{}
}

// askLocked sends a request to the kernel, and returns the owner of the first socket in the reply that is the client's.
// It does not block: the kernel makes each part of the reply during the call of write, or the read of the previous part.
func (c *clients) askLocked(q *Query, request []byte) (found owner) {
	if _, err := unix.Write(c.fd, request); err != nil { // a netlink message without an address goes to the kernel
		return found
	}
	for range maxReads {
		n, err := unix.Read(c.fd, c.buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return found
		}
		who, last := parseReply(c.buffer[:n], c.seq, q)
		if !found.Known {
			found = who
		}
		if last {
			break
		}
	}
	return found
}

// parseReply returns the owner of the first socket in a part of a reply that is the client's, and whether the part is the last.
func parseReply(b []byte, seq uint32, q *Query) (found owner, last bool) {
	for len(b) >= unix.SizeofNlMsghdr {
		length := int(binary.NativeEndian.Uint32(b))
		if length < unix.SizeofNlMsghdr || length > len(b) {
			return found, true
		}
		message := b[:length]
		b = b[min(len(b), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
		if binary.NativeEndian.Uint32(message[8:]) != seq {
			continue // left over from an earlier request
		}
		kind, flags := binary.NativeEndian.Uint16(message[4:]), binary.NativeEndian.Uint16(message[6:])
		last = last || kind != diagByFamily || flags&unix.NLM_F_MULTI == 0
		if kind == diagByFamily && !found.Known {
			found = parseSocket(message[unix.SizeofNlMsghdr:], q)
		}
	}
	return found, last
}

// parseSocket returns the owner of a socket if it has the address of the client, is no listener, and still is a file: what is
// left of a socket that was closed has no inode, and root's uid.
func parseSocket(b []byte, q *Query) (found owner) {
	if len(b) < diagReply || b[replyState] == tcpListen || binary.NativeEndian.Uint32(b[replyInode:]) == 0 {
		return found
	}
	id := b[replyID:]
	src, ok := netip.AddrFromSlice(id[idSrc:idDst])
	if b[0] == unix.AF_INET {
		src, ok = netip.AddrFromSlice(id[idSrc : idSrc+4])
	}
	src = src.Unmap()
	port := binary.BigEndian.Uint16(id)
	if !ok || port != q.Client.Port() || !src.IsUnspecified() && src != q.Client.Addr().WithZone("") {
		return found
	}
	found.Known, found.UID, found.wildcard = true, binary.NativeEndian.Uint32(b[replyUID:]), src.IsUnspecified()
	for attrs := b[diagReply:]; len(attrs) >= unix.SizeofNlAttr; {
		length := int(binary.NativeEndian.Uint16(attrs))
		if length < unix.SizeofNlAttr || length > len(attrs) {
			break
		}
		if binary.NativeEndian.Uint16(attrs[2:]) == attrCgroup && length >= unix.SizeofNlAttr+8 {
			found.Cgroup = binary.NativeEndian.Uint64(attrs[unix.SizeofNlAttr:])
		}
		attrs = attrs[min(len(attrs), (length+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)):]
	}
	return found
}
