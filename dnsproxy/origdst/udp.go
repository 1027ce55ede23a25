package origdst

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// ErrPermission is the error without CAP_NET_ADMIN in the user namespace that owns
// the network namespace.
var ErrPermission = fmt.Errorf("connection tracking may not be asked, CAP_NET_ADMIN is missing: %w", os.ErrPermission)

// bufferSize holds any connection tracking entry: it has about 40 attributes of
// at most 128 bytes each.
const bufferSize = 8 << 10

// A UDP asks connection tracking for UDP flows. Its methods may be called from any
// goroutine.
type UDP struct {
	mu     sync.Mutex
	fd     int // -1 after Close
	seq    uint32
	buffer []byte // the request, then the response
}

// OpenUDP opens a socket to the connection tracking of the calling thread's network
// namespace. It makes a first lookup, so that what every lookup would fail with
// (see [ErrPermission]) is said here. The caller closes it.
func OpenUDP() (*UDP, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket to connection tracking: %w", err)
	}
	u := &UDP{fd: fd, buffer: make([]byte, bufferSize)}
	nobody := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 0)
	if _, _, err := u.Lookup(nobody, nobody); err != nil {
		_ = u.Close()
		return nil, err
	}
	return u, nil
}

// Close closes the socket. Lookups fail from then on with an error that is
// [os.ErrClosed].
func (u *UDP) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.fd < 0 {
		return nil
	}
	fd := u.fd
	u.fd = -1
	return unix.Close(fd)
}

// Lookup returns where a packet, which came from client to the socket at local, was
// on its way to. It returns false, and no error, for one that was not captured: one
// that connection tracking does not know (any more), or that came to local by
// itself. Local is the address that the packet had when it arrived, never the
// wildcard. A link-local IPv6 address has no zone: the kernel does not say on which
// interface it was meant.
func (u *UDP) Lookup(client, local netip.AddrPort) (netip.AddrPort, bool, error) {
	client, local = plain(client), plain(local)
	if !client.IsValid() || client.Addr().Is4() != local.Addr().Is4() {
		return netip.AddrPort{}, false, fmt.Errorf("asking connection tracking: client %q and local address %q: want two of one family",
			client, local)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.fd < 0 {
		return netip.AddrPort{}, false, fmt.Errorf("asking connection tracking: %w", os.ErrClosed)
	}
	original, err := u.askLocked(client, local)
	switch {
	case errors.Is(err, unix.ENOENT), err == nil && original == local:
		return netip.AddrPort{}, false, nil
	case errors.Is(err, unix.EPERM):
		return netip.AddrPort{}, false, ErrPermission
	case errors.Is(err, unix.EINVAL):
		return netip.AddrPort{}, false, fmt.Errorf("asking connection tracking: %w (is the module nf_conntrack_netlink there?)", err)
	case err != nil:
		return netip.AddrPort{}, false, fmt.Errorf("asking connection tracking: %w", err)
	}
	return original, true, nil
}

// askLocked asks for the entry whose reply goes from local to client, and returns
// its original destination. The kernel has the response ready when sending returns,
// so nothing waits here.
func (u *UDP) askLocked(client, local netip.AddrPort) (netip.AddrPort, error) {
	u.seq++
	request := appendRequest(u.buffer[:0], u.seq, local, client)
	if _, err := unix.Write(u.fd, request); err != nil { // goes to the kernel without an address
		return netip.AddrPort{}, err
	}
	for {
		n, err := unix.Read(u.fd, u.buffer)
		if err != nil {
			return netip.AddrPort{}, err
		}
		original, ours, err := parseResponse(u.buffer[:n], u.seq)
		if ours { // others are left over from a lookup that failed
			return original, err
		}
	}
}
