package sockets

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// SplitAddr returns the IP addresses and the port of addr, a host:port to listen on. The host localhost means 127.0.0.1
// and ::1; an empty host means all addresses. Errors begin with name, which is what users call addr.
func SplitAddr(name, addr string) (hosts []netip.Addr, port uint16, err error) {
	host, text, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, 0, fmt.Errorf("%s %q: want host:port: %w", name, addr, err)
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, 0, fmt.Errorf("%s %q: want a port from 0 to 65535", name, addr)
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
		return nil, 0, fmt.Errorf("%s %q: want an IP address, localhost or nothing before the port", name, addr)
	}
	return []netip.Addr{ip.Unmap()}, port, nil
}

// TCPConfig returns the configuration to open TCP listeners with. It disables Multipath TCP, because the kernel does
// not report the original destination of such connections.
func TCPConfig() net.ListenConfig {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	return config
}

// FreeBind permits binding a socket to an address that the host does not have yet. Use it as the Control of a
// [net.ListenConfig].
func FreeBind(_, _ string, conn syscall.RawConn) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_FREEBIND, 1) //nolint:gosec // a descriptor
	})
	return errors.Join(controlErr, err)
}

// OfThisHost reports whether addr is an address of this host, to which a socket can be bound. If there is no descriptor
// or memory for such a socket, the result is true. It takes about 2 µs, unless addr is a loopback address.
func OfThisHost(addr netip.Addr) bool {
	if addr.IsLoopback() {
		return true
	}
	domain, address := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Addr: addr.As16()})
	if addr.Is4() {
		domain, address = unix.AF_INET, &unix.SockaddrInet4{Addr: addr.As4()}
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return true
	}
	defer func() { _ = unix.Close(fd) }()
	return !errors.Is(unix.Bind(fd, address), unix.EADDRNOTAVAIL)
}

// WrongAddr reports whether err, from opening a listener, means that the address is wrong: it does not
// parse, its host name does not resolve, this host does not have it, or this process may not use it. All other errors
// may pass: another program may have the address, or descriptors or memory may be missing.
func WrongAddr(err error) bool {
	for _, wrong := range []error{unix.EADDRNOTAVAIL, unix.EACCES, unix.EPERM, unix.EAFNOSUPPORT} {
		if errors.Is(err, wrong) {
			return true
		}
	}
	_, text := errors.AsType[*net.AddrError](err)
	name, lookup := errors.AsType[*net.DNSError](err)
	return text || lookup && name.IsNotFound
}

// The pause before each attempt of Retry doubles from minRetry up to maxRetry.
const (
	minRetry = 100 * time.Millisecond
	maxRetry = 5 * time.Second
)

// Retry calls the function attempt until it succeeds. Retry waits before each call, and longer after each failure.
// It returns false if ctx ends before attempt succeeds.
func Retry(ctx context.Context, attempt func() error) bool {
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
		if attempt() == nil {
			return true
		}
	}
}

// TCPAddr returns the address of a listening TCP socket, or the zero AddrPort for any other file.
func TCPAddr(file *os.File) netip.AddrPort {
	listener, err := net.FileListener(file) // a duplicate
	if err != nil {
		return netip.AddrPort{}
	}
	defer func() { _ = listener.Close() }()
	if tcp, ok := listener.Addr().(*net.TCPAddr); ok {
		return tcp.AddrPort()
	}
	return netip.AddrPort{}
}

// UDPPort returns the port of a UDP socket, or 0 for any other file.
func UDPPort(file *os.File) uint16 {
	conn, err := net.FilePacketConn(file) // a duplicate
	if err != nil {
		return 0
	}
	defer func() { _ = conn.Close() }()
	udp, ok := conn.LocalAddr().(*net.UDPAddr)
	if !ok {
		return 0
	}
	return uint16(udp.Port) //nolint:gosec // a port
}
