package sockets

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// SplitAddr returns the IP addresses and the port of an address to listen on, a host:port. localhost is
// 127.0.0.1 and ::1, and no host is all addresses. An error begins with what, the address's name for users.
func SplitAddr(what, addr string) (hosts []netip.Addr, port uint16, err error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, 0, fmt.Errorf("%s %q: want host:port: %w", what, addr, err)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, 0, fmt.Errorf("%s %q: want a port from 0 to 65535", what, addr)
	}
	port = uint16(n)
	switch host {
	case "localhost":
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, port, nil
	case "":
		return []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}, port, nil
	}
	ip, err := netip.ParseAddr(host)
	if err != nil || ip.Zone() != "" {
		return nil, 0, fmt.Errorf("%s %q: want an IP address, localhost or nothing before the port", what, addr)
	}
	return []netip.Addr{ip.Unmap()}, port, nil
}

// TCPConfig returns how TCP listeners are opened: without Multipath TCP, of which the kernel does not say the
// original destination.
func TCPConfig() net.ListenConfig {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	return config
}

// FreeBind lets a socket be bound to an address that the host does not have yet. It is a Control of a
// [net.ListenConfig].
func FreeBind(_, _ string, conn syscall.RawConn) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) //nolint:gosec // a descriptor
	})
	return errors.Join(controlErr, err)
}
