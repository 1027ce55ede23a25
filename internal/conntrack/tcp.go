package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// OriginalTCP returns the original destination of an accepted connection. It returns
// false, and no error, for a connection that was not captured: connection tracking has no
// entry, or the client connected to the local address. An error means that it is not known whether
// the connection was captured.
//
// A link-local IPv6 address has no zone: the kernel does not say which interface was
// meant.
func OriginalTCP(conn *net.TCPConn) (original netip.AddrPort, ok bool, err error) {
	address, _ := conn.LocalAddr().(*net.TCPAddr)
	local := canonical(address.AddrPort()) // not valid if conn is closed
	raw, err := conn.SyscallConn()
	if err == nil {
		read := original6
		if local.Addr().Is4() {
			read = original4
		}
		controlErr := raw.Control(func(fd uintptr) { original, err = read(int(fd)) }) //nolint:gosec // a descriptor
		err = errors.Join(controlErr, err)
	}
	switch {
	// ENOENT: there is no entry. ENOPROTOOPT: the kernel's modules are missing, so no rule
	// can capture either.
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOPROTOOPT):
		return netip.AddrPort{}, false, nil
	case err != nil:
		return netip.AddrPort{}, false, fmt.Errorf("finding a connection's original destination: %w", err)
	case original == local:
		return netip.AddrPort{}, false, nil
	}
	return original, true, nil
}

// canonical returns an address without its zone, and an IPv4-mapped address as IPv4: connection tracking has neither
// zones nor IPv4-mapped addresses.
func canonical(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// original4 reads SO_ORIGINAL_DST of an IPv4 connection. x/sys has no function that gets a socket address as an
// option, so original4 uses the function for another option, one with a value that is at least as large.
func original4(fd int) (netip.AddrPort, error) {
	mreq, err := unix.GetsockoptIPv6Mreq(fd, unix.IPPROTO_IP, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	// A sockaddr_in: the family in 2 bytes, the port in 2, the address in 4.
	raw := mreq.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[4:8])), binary.BigEndian.Uint16(raw[2:4])), nil
}

// original6 reads IP6T_SO_ORIGINAL_DST, whose number equals SO_ORIGINAL_DST.
func original6(fd int) (netip.AddrPort, error) {
	info, err := unix.GetsockoptIPv6MTUInfo(fd, unix.IPPROTO_IPV6, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var port [2]byte // the field holds it in network byte order
	binary.NativeEndian.PutUint16(port[:], info.Addr.Port)
	return netip.AddrPortFrom(netip.AddrFrom16(info.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}
