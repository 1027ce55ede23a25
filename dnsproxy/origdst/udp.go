package origdst

import (
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
var ErrPermission = fmt.Errorf("connection tracking may not be asked, CAP_NET_ADMIN is missing: %w", os.ErrPermission)

// ErrUnsupported is the error of a kernel that has no netlink interface to connection
// tracking, as long as its module is not loaded.
var ErrUnsupported = fmt.Errorf("connection tracking cannot be asked, the module nf_conntrack_netlink is missing: %w", errors.ErrUnsupported)

// bufferSize holds any connection tracking entry: it has about 40 attributes of
// at most 128 bytes each.
const bufferSize = 8 << 10

// attempts is how often a lookup is tried while the kernel does not answer it.
const attempts = 3

// maxSockets is how many lookups can be made at a time, if there are as many processors.
const maxSockets = 8

// A UDP asks connection tracking for UDP flows. Its methods may be called from any
// goroutine. It has several sockets, since a lookup takes a socket for as long as the
// kernel takes.
type UDP struct {
	all    []*socket
	free   chan *socket  // those that no lookup has
	closed chan struct{} // closed by Close
	once   sync.Once
}

// A socket makes one lookup at a time.
type socket struct {
	fd     int
	seq    uint32
	buffer []byte // the request, then the response
}

// OpenUDP opens sockets to the connection tracking of the calling thread's network
// namespace. It makes a first lookup, so that what every lookup would fail with is said
// here. [ErrPermission] and [ErrUnsupported] say what is missing; any other error may
// pass. The caller closes it.
func OpenUDP() (*UDP, error) {
	n := min(max(2, runtime.GOMAXPROCS(0)), maxSockets)
	u := &UDP{free: make(chan *socket, n), closed: make(chan struct{})}
	for range n {
		fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
		if err != nil {
			_ = u.Close()
			return nil, fmt.Errorf("opening a netlink socket to connection tracking: %w", classify(err))
		}
		s := &socket{fd: fd, buffer: make([]byte, bufferSize)}
		u.all = append(u.all, s)
		u.free <- s
	}
	nobody := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0)
	if _, _, err := u.Lookup(nobody, nobody); err != nil {
		_ = u.Close()
		return nil, err
	}
	return u, nil
}

// Close closes the sockets once no lookup has them. Lookups fail from then on with an
// error that is [os.ErrClosed].
func (u *UDP) Close() error {
	var err error
	u.once.Do(func() {
		close(u.closed)
		for range u.all {
			s := <-u.free
			err = errors.Join(err, unix.Close(s.fd))
		}
	})
	return err
}

// Lookup returns where a packet, which came from client to the socket at local, was
// on its way to. It returns false, and no error, for one that was not captured: one
// that connection tracking does not know (any more), or that came to local by
// itself. Local is the address that the packet had when it arrived, never the
// wildcard. A link-local IPv6 address has no zone: the kernel does not say on which
// interface it was meant.
//
// An error other than [ErrPermission] and [ErrUnsupported] may pass: nothing is known of
// the packet then, after a few attempts at once.
func (u *UDP) Lookup(client, local netip.AddrPort) (netip.AddrPort, bool, error) {
	client, local = plain(client), plain(local)
	if !client.IsValid() || client.Addr().Is4() != local.Addr().Is4() {
		return netip.AddrPort{}, false, fmt.Errorf("asking connection tracking: client %q and local address %q: want two of one family",
			client, local)
	}
	original, err := u.ask(client, local)
	switch {
	case errors.Is(err, unix.ENOENT), err == nil && original == local:
		return netip.AddrPort{}, false, nil
	case err != nil:
		return netip.AddrPort{}, false, fmt.Errorf("asking connection tracking: %w", err)
	}
	return original, true, nil
}

// classify returns [ErrPermission] or [ErrUnsupported] for the errors that mean it, and
// others as they are.
func classify(err error) error {
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return ErrPermission
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT):
		return ErrUnsupported // nfnetlink_rcv_msg says EINVAL, socket(2) the others
	}
	return err
}

// ask is [socket.ask] with a socket that no other lookup has.
func (u *UDP) ask(client, local netip.AddrPort) (netip.AddrPort, error) {
	select {
	case <-u.closed: // first, as there may be free ones yet
		return netip.AddrPort{}, os.ErrClosed
	default:
	}
	select {
	case s := <-u.free:
		defer func() { u.free <- s }()
		for attempt := 1; ; attempt++ {
			original, err := s.ask(client, local)
			err = classify(err)
			if attempt == attempts || !passing(err) {
				return original, err
			}
		}
	case <-u.closed:
		return netip.AddrPort{}, os.ErrClosed
	}
}

// passing reports whether a lookup failed with an error that may pass.
func passing(err error) bool {
	return err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, ErrPermission) && !errors.Is(err, ErrUnsupported)
}

// ask asks for the entry whose reply goes from local to client, and returns its original
// destination. The kernel has the response ready when sending returns, so nothing waits
// here.
func (s *socket) ask(client, local netip.AddrPort) (netip.AddrPort, error) {
	s.seq++
	request := appendRequest(s.buffer[:0], s.seq, local, client)
	if _, err := unix.Write(s.fd, request); err != nil { // goes to the kernel without an address
		return netip.AddrPort{}, err
	}
	for {
		n, err := unix.Read(s.fd, s.buffer)
		if err != nil {
			return netip.AddrPort{}, err
		}
		original, ours, err := parseResponse(s.buffer[:n], s.seq)
		if ours { // others are left over from a lookup that failed
			return original, err
		}
	}
}
