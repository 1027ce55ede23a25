package origdst

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// TCP returns where the peer of an accepted connection meant to connect to. It
// returns false, and no error, for a connection that was not captured: one that
// connection tracking does not know, or that came to the local address by itself. After an
// error nothing is known of the connection.
//
// A link-local IPv6 address has no zone: the kernel does not say on which
// interface it was meant.
func TCP(conn *net.TCPConn) (netip.AddrPort, bool, error) {
	local := addrPort(conn.LocalAddr())
	raw, err := conn.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, false, fmt.Errorf("asking for a connection's original destination: %w", err)
	}
	var original netip.AddrPort
	var optErr error
	err = raw.Control(func(fd uintptr) {
		if local.Addr().Is4() {
			original, optErr = original4(int(fd))
		} else {
			original, optErr = original6(int(fd))
		}
	})
	// Without an entry it is ENOENT; without the modules for it ENOPROTOOPT, and then there
	// is no rule that could capture. After any other error nothing is known.
	if errors.Is(optErr, unix.ENOENT) || errors.Is(optErr, unix.ENOPROTOOPT) {
		return netip.AddrPort{}, false, nil
	}
	if err = errors.Join(err, optErr); err != nil {
		return netip.AddrPort{}, false, fmt.Errorf("asking for a connection's original destination: %w", err)
	}
	if original == local {
		return netip.AddrPort{}, false, nil
	}
	return original, true, nil
}

// addrPort returns a TCP address without a zone, IPv4-mapped ones as IPv4.
func addrPort(addr net.Addr) netip.AddrPort {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	return plain(tcp.AddrPort())
}

// plain returns an address as connection tracking knows it: without a zone,
// IPv4-mapped ones as IPv4.
func plain(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// original4 reads SO_ORIGINAL_DST of an IPv4 connection. x/sys has no call that
// returns a socket address from getsockopt; one for another option of at least
// that size does it.
func original4(fd int) (netip.AddrPort, error) {
	mreq, err := unix.GetsockoptIPv6Mreq(fd, unix.IPPROTO_IP, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	// A sockaddr_in: the family in 2 bytes, the port in 2, the address in 4.
	raw := mreq.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(raw[4:8])), binary.BigEndian.Uint16(raw[2:4])), nil
}

// original6 reads IP6T_SO_ORIGINAL_DST, which has the number of SO_ORIGINAL_DST.
func original6(fd int) (netip.AddrPort, error) {
	info, err := unix.GetsockoptIPv6MTUInfo(fd, unix.IPPROTO_IPV6, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	var port [2]byte // as it lies in memory is as it came over the network
	binary.NativeEndian.PutUint16(port[:], info.Addr.Port)
	return netip.AddrPortFrom(netip.AddrFrom16(info.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}
