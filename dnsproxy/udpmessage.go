package dnsproxy

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// controlLen is enough for the largest control message that a query has, in6_pktinfo.
const controlLen = 64

// A udpMessage is a UDP packet with its source and destination addresses in the
// kernel's form. It must not be copied.
type udpMessage struct {
	// packet is the buffer for received packets. In a clone, it has the bytes of one packet.
	packet  []byte
	name    unix.RawSockaddrInet6 // the source address; for IPv4 it holds a RawSockaddrInet4, which is shorter
	nameLen uint32
	// envelope is nil unless the socket is bound to all addresses.
	envelope *envelope
}

// An envelope has the arguments of recvmsg(2) and sendmsg(2).
type envelope struct {
	header  unix.Msghdr
	vector  unix.Iovec
	control [controlLen]byte
}

// newUDPMessage returns a message for packets of up to size bytes; wildcard is true if
// the socket is bound to all addresses.
func newUDPMessage(size int, wildcard bool) *udpMessage {
	m := &udpMessage{packet: make([]byte, size)}
	if wildcard {
		m.envelope = new(envelope)
		m.point()
	}
	return m
}

// point makes the envelope point to the message's own fields.
func (m *udpMessage) point() {
	header := &m.envelope.header
	header.Name = (*byte)(unsafe.Pointer(&m.name))
	header.Iov = &m.envelope.vector
	header.SetIovlen(1)
	header.Control = &m.envelope.control[0]
}

// receive reads a packet from the socket fd. The packet is valid until the next call. receive does
// not block.
func (m *udpMessage) receive(fd uintptr) ([]byte, unix.Errno) {
	m.nameLen = unix.SizeofSockaddrInet6
	if m.envelope != nil {
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

// receiveMsg is receive for a socket that is bound to all addresses: it also reads the packet's destination address.
func (m *udpMessage) receiveMsg(fd uintptr) ([]byte, unix.Errno) {
	e := m.envelope
	e.vector.Base = &m.packet[0]
	e.vector.SetLen(len(m.packet))
	e.header.Namelen = m.nameLen
	e.header.SetControllen(len(e.control))
	n, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, fd, uintptr(unsafe.Pointer(&e.header)), unix.MSG_DONTWAIT)
	if errno != 0 {
		return nil, errno
	}
	return m.packet[:n], 0
}

// send sends response to the client: to the source address of the message, from its destination address.
// It does not block.
func (m *udpMessage) send(fd uintptr, response []byte) unix.Errno {
	if m.envelope != nil {
		return m.sendMsg(fd, response)
	}
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, fd,
		uintptr(unsafe.Pointer(&response[0])), uintptr(len(response)), unix.MSG_DONTWAIT,
		uintptr(unsafe.Pointer(&m.name)), uintptr(m.nameLen))
	return errno
}

// sendMsg is send for a socket that is bound to all addresses.
func (m *udpMessage) sendMsg(fd uintptr, response []byte) unix.Errno {
	e := m.envelope
	e.vector.Base = &response[0]
	e.vector.SetLen(len(response))
	e.header.Flags = 0
	control := (*unix.Cmsghdr)(unsafe.Pointer(&e.control[0]))
	if e.header.Controllen >= unix.SizeofCmsghdr && control.Level == unix.IPPROTO_IP && control.Type == unix.IP_PKTINFO {
		// The control message has the destination address of the packet, which
		// becomes the source address of the response. The routes choose the interface.
		info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&e.control[unix.CmsgLen(0)]))
		info.Ifindex = 0
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&e.header)), unix.MSG_DONTWAIT)
	return errno
}

// client returns the source address of the message.
func (m *udpMessage) client() netip.AddrPort {
	if m.name.Family == unix.AF_INET {
		name := (*unix.RawSockaddrInet4)(unsafe.Pointer(&m.name))
		return netip.AddrPortFrom(netip.AddrFrom4(name.Addr), networkOrder(name.Port))
	}
	return netip.AddrPortFrom(netip.AddrFrom16(m.name.Addr).Unmap(), networkOrder(m.name.Port))
}

// networkOrder returns the number of a port that the kernel wrote in network byte order.
func networkOrder(port uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], port)
	return binary.BigEndian.Uint16(b[:])
}

// local returns the destination address of the message; bound is the address that the socket is bound to.
func (m *udpMessage) local(bound netip.AddrPort) netip.AddrPort {
	e := m.envelope
	if e == nil || e.header.Controllen < unix.SizeofCmsghdr {
		return bound
	}
	control := (*unix.Cmsghdr)(unsafe.Pointer(&e.control[0]))
	switch {
	case control.Level == unix.IPPROTO_IP && control.Type == unix.IP_PKTINFO:
		info := (*unix.Inet4Pktinfo)(unsafe.Pointer(&e.control[unix.CmsgLen(0)]))
		return netip.AddrPortFrom(netip.AddrFrom4(info.Addr), bound.Port())
	case control.Level == unix.IPPROTO_IPV6 && control.Type == unix.IPV6_PKTINFO:
		info := (*unix.Inet6Pktinfo)(unsafe.Pointer(&e.control[unix.CmsgLen(0)]))
		return netip.AddrPortFrom(netip.AddrFrom16(info.Addr).Unmap(), bound.Port())
	}
	return bound
}

// clone copies a message with the first n bytes of its packet, for another goroutine.
func (m *udpMessage) clone(n int) *udpMessage {
	c := &udpMessage{
		packet: append([]byte(nil), m.packet[:n]...),
		name:   m.name, nameLen: m.nameLen,
	}
	if m.envelope != nil {
		copied := *m.envelope
		c.envelope = &copied
		c.point()
	}
	return c
}
