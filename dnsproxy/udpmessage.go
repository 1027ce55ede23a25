package dnsproxy

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// controlLen is room for the largest control message that is received, the
// in6_pktinfo of a query.
const controlLen = 64

// A udpMessage is a packet with the addresses it came from and was sent to, in the
// form in which the kernel gives and takes them. It must not be copied.
type udpMessage struct {
	packet  []byte
	name    unix.RawSockaddrAny
	nameLen uint32

	// Of a socket that is bound to all addresses.
	header  *unix.Msghdr // nil for others
	vector  unix.Iovec
	control [controlLen]byte
}

// newUDPMessage returns a message for packets of up to size bytes; wildcard says
// that the socket is bound to all addresses.
func newUDPMessage(size int, wildcard bool) *udpMessage {
	m := &udpMessage{packet: make([]byte, size)}
	if wildcard {
		m.header = &unix.Msghdr{}
		m.point()
	}
	return m
}

// point has the header point to the message's own fields.
func (m *udpMessage) point() {
	m.header.Name = (*byte)(unsafe.Pointer(&m.name))
	m.header.Iov = &m.vector
	m.header.SetIovlen(1)
	m.header.Control = &m.control[0]
}

// receive takes a packet from the socket, which is good until the next. It does
// not block.
func (m *udpMessage) receive(fd uintptr) ([]byte, unix.Errno) {
	m.nameLen = unix.SizeofSockaddrAny
	if m.header != nil {
		return m.receiveMsg(fd)
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, fd,
		uintptr(unsafe.Pointer(&m.packet[0])), uintptr(len(m.packet)), unix.MSG_DONTWAIT,
		uintptr(unsafe.Pointer(&m.name)), uintptr(unsafe.Pointer(&m.nameLen)))
	if errno != 0 {
		return nil, errno
	}
	return m.packet[:n], 0
}

// receiveMsg is receive with the address that the packet was sent to.
func (m *udpMessage) receiveMsg(fd uintptr) ([]byte, unix.Errno) {
	m.vector.Base = &m.packet[0]
	m.vector.SetLen(len(m.packet))
	m.header.Namelen = m.nameLen
	m.header.SetControllen(len(m.control))
	n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(m.header)), unix.MSG_DONTWAIT)
	if errno != 0 {
		return nil, errno
	}
	return m.packet[:n], 0
}

// send sends a response to where the message came from, from where it was sent to.
// It does not block. Before it sends, the kernel may hand out an error of the socket that
// another client caused, such as ECONNREFUSED; so it is tried twice.
func (m *udpMessage) send(fd uintptr, response []byte) unix.Errno {
	errno := m.sendOnce(fd, response)
	if errno != 0 && errno != unix.EAGAIN {
		errno = m.sendOnce(fd, response)
	}
	return errno
}

// sendOnce is one attempt of send.
func (m *udpMessage) sendOnce(fd uintptr, response []byte) unix.Errno {
	if m.header != nil {
		return m.sendMsg(fd, response)
	}
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, fd,
		uintptr(unsafe.Pointer(&response[0])), uintptr(len(response)), unix.MSG_DONTWAIT,
		uintptr(unsafe.Pointer(&m.name)), uintptr(m.nameLen))
	return errno
}

// sendMsg is send for a socket that is bound to all addresses.
func (m *udpMessage) sendMsg(fd uintptr, response []byte) unix.Errno {
	m.vector.Base = &response[0]
	m.vector.SetLen(len(response))
	m.header.Flags = 0
	control := (*unix.Cmsghdr)(unsafe.Pointer(&m.control[0]))
	if m.header.Controllen >= unix.SizeofCmsghdr && control.Level == unix.IPPROTO_IP && control.Type == unix.IP_PKTINFO {
		// The control message that said where the packet was sent to now says where
		// the response is from; which interface to use is for the routes to say.
		info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&m.control[unix.CmsgLen(0)]))
		info.Ifindex = 0
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(m.header)), unix.MSG_DONTWAIT)
	return errno
}

// client returns where a message came from.
func (m *udpMessage) client() netip.AddrPort {
	if m.name.Addr.Family == unix.AF_INET {
		name := (*unix.RawSockaddrInet4)(unsafe.Pointer(&m.name))
		return netip.AddrPortFrom(netip.AddrFrom4(name.Addr), networkOrder(name.Port))
	}
	name := (*unix.RawSockaddrInet6)(unsafe.Pointer(&m.name))
	return netip.AddrPortFrom(netip.AddrFrom16(name.Addr).Unmap(), networkOrder(name.Port))
}

// networkOrder returns a port that the kernel gave as two bytes.
func networkOrder(port uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], port)
	return binary.BigEndian.Uint16(b[:])
}

// local returns where a message was sent to; bound is what its socket is bound to.
func (m *udpMessage) local(bound netip.AddrPort) netip.AddrPort {
	control := (*unix.Cmsghdr)(unsafe.Pointer(&m.control[0]))
	switch {
	case m.header == nil || m.header.Controllen < unix.SizeofCmsghdr:
		return bound
	case control.Level == unix.IPPROTO_IP && control.Type == unix.IP_PKTINFO:
		info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&m.control[unix.CmsgLen(0)]))
		return netip.AddrPortFrom(netip.AddrFrom4(info.Addr), bound.Port())
	case control.Level == unix.IPPROTO_IPV6 && control.Type == unix.IPV6_PKTINFO:
		info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&m.control[unix.CmsgLen(0)]))
		return netip.AddrPortFrom(netip.AddrFrom16(info.Addr).Unmap(), bound.Port())
	}
	return bound
}

// clone copies a message with the first n bytes of its packet, for another
// goroutine.
func (m *udpMessage) clone(n int) *udpMessage {
	c := &udpMessage{
		packet: append([]byte(nil), m.packet[:n]...),
		name:   m.name, nameLen: m.nameLen, control: m.control,
	}
	if m.header != nil {
		header := *m.header
		c.header = &header
		c.point()
	}
	return c
}
