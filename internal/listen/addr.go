package listen

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
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

// Reachable returns the address at which programs of this host reach a server that listens on addr, a host:port. A server on
// all addresses is reached on loopback, which needs no route. The result has no name that would need a nameserver.
func Reachable(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil {
		return "", errors.New("want host:port")
	}
	switch ip, err := netip.ParseAddr(host); {
	case host == "", host == "localhost":
		host = "127.0.0.1"
	case err == nil && ip.IsUnspecified():
		host = family.Of(ip).Loopback().String()
	}
	return net.JoinHostPort(host, port), nil
}

// An Addr is the address of a socket.
type Addr struct {
	Network string `json:"network"` // "udp" or "tcp"
	Address string `json:"address"` // host:port
}

// addrOf returns the address of a socket.
func addrOf(addr net.Addr) Addr { return Addr{Network: addr.Network(), Address: addr.String()} }

// String returns the network and the address, as logs show them.
func (a Addr) String() string { return a.Network + " " + a.Address }

// AddrPort returns the address and the port.
func (a Addr) AddrPort() netip.AddrPort {
	addr, _ := netip.ParseAddrPort(a.Address) // never fails for a UDP or TCP socket
	return addr
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

// OnInterface reports whether an interface of this network namespace has the address.
func OnInterface(addr netip.Addr) (bool, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false, fmt.Errorf("reading the addresses of this network namespace: %w", err)
	}
	return slices.ContainsFunc(addrs, func(a net.Addr) bool {
		prefix, err := netip.ParsePrefix(a.String())
		return err == nil && prefix.Addr().Unmap() == addr.Unmap()
	}), nil
}

// AsUser calls f on a thread whose new sockets belong to a user and a group: the kernel takes the owner of a socket from
// the thread that opens it. AsUser returns the error of f. It needs CAP_SETUID and CAP_SETGID.
func AsUser(uid, gid int, f func() error) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := errors.Join(unix.Setfsgid(gid), unix.Setfsuid(uid))
		if now, _ := unix.SetfsuidRetUid(-1); now != uid {
			err = fmt.Errorf("opening a socket of the user %d: CAP_SETUID is missing", uid)
		}
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}
