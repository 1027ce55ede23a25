package resolved

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// LinkName is the name of the network interface that is registered.
const LinkName = "nametap-dns"

// linkKinds are the kinds of interfaces that carry no packet, in the order of preference. A
// kernel may lack one of them.
func linkKinds() []string { return []string{"dummy", "ifb"} }

// linkAddr is the address of the interface: systemd-resolved ignores interfaces whose addresses
// have the scope of a link or of the host. The address is a loopback address, which programs
// that look for addresses of this host skip, and its scope is that of a site, so the kernel
// never chooses it as the source of a packet to another host.
func linkAddr() [4]byte { return [4]byte{127, 15, 53, 1} }

// Values of linux/if_link.h that package unix lacks.
const (
	inet6AddrGenMode = 8 // IFLA_INET6_ADDR_GEN_MODE
	addrGenModeNone  = 1 // IN6_ADDR_GEN_MODE_NONE
)

// The indexes of interfaces that nametap creates. The kernel counts those of others from 1.
const lowestIndex, highestIndex = 1 << 20, 1 << 30

// errForeign says that another program has made an interface of that name.
var errForeign = errors.New("another program has made the interface " + LinkName + ": rename or delete it")

// findLink returns the index of the interface, 0 if there is none.
func findLink() (int, error) {
	link, err := net.InterfaceByName(LinkName)
	switch {
	case err == nil && link.Index < lowestIndex:
		return 0, errForeign
	case err == nil:
		return link.Index, nil
	case isNoLink(err):
		return 0, nil
	}
	return 0, fmt.Errorf("looking for the interface %s: %w", LinkName, err)
}

// isNoLink reports whether an error of package net says that there is no such interface. The
// package does not export that error.
func isNoLink(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Err.Error() == "no such network interface"
}

// makeLink creates the interface, or completes it, and returns its index.
//
// systemd-resolved knows interfaces by their index alone, and may run in another network
// namespace than the agent, where the same index is another interface. So the index is random:
// systemd-resolved knows it only if it sees this interface.
func makeLink() (int, error) {
	index, err := findLink()
	if err == nil && index == 0 {
		index, err = createLink()
	}
	if err == nil {
		err = configureLink(index)
	}
	if err != nil {
		return 0, fmt.Errorf("creating the interface %s: %w", LinkName, err)
	}
	return index, nil
}

// createLink creates the interface.
func createLink() (int, error) {
	index := lowestIndex + rand.IntN(highestIndex-lowestIndex) //nolint:gosec // against accidents only
	var err error
	for _, kind := range linkKinds() {
		if err = routeRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, newLink(index, kind)); !errors.Is(err, unix.EOPNOTSUPP) {
			break
		}
	}
	if err == nil {
		_ = routeRequest(unix.RTM_NEWLINK, 0, withoutIPv6(index)) // fails if this host has no IPv6
	}
	return index, err
}

// newLink returns the request for a new interface.
func newLink(index int, kind string) []byte {
	request := linkHeader(index, 0)
	request = appendAttribute(request, unix.IFLA_IFNAME, []byte(LinkName+"\x00"))
	return appendAttribute(request, unix.IFLA_LINKINFO|unix.NLA_F_NESTED,
		appendAttribute(nil, unix.IFLA_INFO_KIND, []byte(kind)))
}

// withoutIPv6 returns the request after which an interface gets no link-local IPv6 address when
// it is set up.
func withoutIPv6(index int) []byte {
	inet6 := appendAttribute(nil, inet6AddrGenMode, []byte{addrGenModeNone})
	return appendAttribute(linkHeader(index, 0), unix.IFLA_AF_SPEC|unix.NLA_F_NESTED,
		appendAttribute(nil, unix.AF_INET6|unix.NLA_F_NESTED, inet6))
}

// configureLink gives the interface its address and sets it up. It may have both already.
func configureLink(index int) error {
	addr := linkAddr()
	request := []byte{unix.AF_INET, 8 * uint8(len(addr)), unix.IFA_F_PERMANENT, unix.RT_SCOPE_SITE}
	request = binary.NativeEndian.AppendUint32(request, uint32(index)) //nolint:gosec // positive
	request = appendAttribute(request, unix.IFA_LOCAL, addr[:])
	request = appendAttribute(request, unix.IFA_ADDRESS, addr[:])
	if err := routeRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, request); err != nil {
		return err
	}
	return routeRequest(unix.RTM_NEWLINK, 0, linkHeader(index, unix.IFF_UP))
}

// RemoveLink deletes the interface, if there is one that nametap has made. systemd-resolved then
// forgets the registration.
func RemoveLink() error {
	index, err := findLink()
	if errors.Is(err, errForeign) {
		return nil
	}
	if err != nil || index == 0 {
		return err
	}
	err = routeRequest(unix.RTM_DELLINK, 0, linkHeader(index, 0))
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("deleting the interface %s: %w", LinkName, err)
	}
	return nil
}

// linkHeader returns the header of a request for an interface, with flags to set.
func linkHeader(index int, flags uint32) []byte {
	header := make([]byte, unix.SizeofIfInfomsg) // family 1, padding 1, type 2, index 4, flags 4, mask 4
	binary.NativeEndian.PutUint32(header[4:], uint32(index))
	binary.NativeEndian.PutUint32(header[8:], flags)
	binary.NativeEndian.PutUint32(header[12:], flags)
	return header
}

// appendAttribute appends an attribute of a request.
func appendAttribute(b []byte, kind uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value))) //nolint:gosec // short
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%unix.NLMSG_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

// routeRequest sends a request to the kernel (rtnetlink(7)) and returns its error.
func routeRequest(kind uint16, flags uint16, body []byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	header := make([]byte, unix.SizeofNlMsghdr) // length 4, type 2, flags 2, sequence 4, port 4
	binary.NativeEndian.PutUint32(header, uint32(unix.SizeofNlMsghdr+len(body)))
	binary.NativeEndian.PutUint16(header[4:], kind)
	binary.NativeEndian.PutUint16(header[6:], unix.NLM_F_REQUEST|unix.NLM_F_ACK|flags)
	if err := unix.Sendto(fd, append(header, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	buffer := make([]byte, os.Getpagesize())
	n, err := unix.Read(fd, buffer)
	if err != nil {
		return os.NewSyscallError("read", err)
	}
	return acknowledged(buffer[:n])
}

// acknowledged returns the error of an acknowledgement.
func acknowledged(datagram []byte) error {
	messages, err := syscall.ParseNetlinkMessage(datagram)
	if err != nil {
		return err
	}
	for _, m := range messages {
		if m.Header.Type == unix.NLMSG_ERROR && len(m.Data) >= 4 {
			if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 { //nolint:gosec // the kernel's int
				return unix.Errno(-code)
			}
			return nil
		}
	}
	return errors.New("the kernel did not acknowledge a request")
}
