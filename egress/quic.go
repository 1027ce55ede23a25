package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/sockets"
)

const (
	// minQUIC is the length in bytes of the shortest packet that is answered. A client's first packet is no
	// shorter (RFC 9000, section 14.1). The answer is shorter, so an attacker with a forged source address gains
	// nothing.
	minQUIC = 1200
	// longHeader is the bit of the first byte that is set if a packet has a version (RFC 8999, section 5.1).
	// fixedBit is another bit of that byte, which the answer should have, too (RFC 9000, section 17.2.1).
	longHeader, fixedBit = 0x80, 0x40
	// versionAt is the byte at which the version of a packet begins, and idsAt the byte at which its connection IDs
	// begin.
	versionAt, idsAt = 1, 5
	// reservedVersion and otherReserved are versions that no client uses (RFC 9000, section 15).
	reservedVersion, otherReserved uint32 = 0x1a2a3a4a, 0x5a6a7a8a
)

// versionNegotiation returns the answer to the first packet of a QUIC client: a Version Negotiation packet without a
// version that the client could use. The client then uses TCP at once (RFC 9000, section 6.2). The answer needs neither
// keys nor state. For any other packet, versionNegotiation returns nil.
func versionNegotiation(packet []byte) []byte {
	if len(packet) < minQUIC || packet[0]&longHeader == 0 {
		return nil
	}
	version := binary.BigEndian.Uint32(packet[versionAt:])
	to, rest, ok := cutID(packet[idsAt:])
	from, _, ok2 := cutID(rest)
	if !ok || !ok2 || version == 0 { // version 0: a Version Negotiation packet itself
		return nil
	}
	offer := reservedVersion
	if version == offer {
		offer = otherReserved
	}
	answer := []byte{longHeader | fixedBit, 0, 0, 0, 0}
	for _, id := range [][]byte{from, to} {
		answer = append(append(answer, byte(len(id))), id...) //nolint:gosec // its length was a byte
	}
	return binary.BigEndian.AppendUint32(answer, offer)
}

// cutID returns the connection ID at the start of b, and the rest of b. The first byte of b is the length of the ID.
// ok is false if b is too short.
func cutID(b []byte) (id, rest []byte, ok bool) {
	if len(b) == 0 || len(b) <= int(b[0]) {
		return nil, nil, false
	}
	end := 1 + int(b[0])
	return b[1:end], b[end:], true
}

// answerQUIC answers QUIC clients on the UDP port of a listener until ctx ends. If another program has the port, it tries
// again later.
func answerQUIC(ctx context.Context, addr netip.AddrPort, log *slog.Logger) {
	conn, err := listenQUIC(ctx, addr)
	if err != nil {
		log.Warn("degraded: HTTP/3 clients of VIPs use TCP only after their own timeout; retrying", "error", err)
		if !sockets.Retry(ctx, func() (err error) { conn, err = listenQUIC(ctx, addr); return err }) {
			return
		}
	}
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })() // nothing is buffered
	pacer := &sockets.Pacer{Log: log, Listener: "egress udp " + addr.String()}
	for packet, control := make([]byte, 1<<16), make([]byte, 128); ctx.Err() == nil; {
		if err := answerOne(conn, packet, control); err != nil && ctx.Err() == nil {
			pacer.Wait(err, ctx.Done())
		}
	}
}

// answerOne waits for a packet and answers it from the address that it was sent to.
func answerOne(conn *net.UDPConn, packet, control []byte) error {
	n, more, _, client, err := conn.ReadMsgUDPAddrPort(packet, control)
	if err != nil {
		return err
	}
	answer := versionNegotiation(packet[:n])
	if answer == nil {
		return nil
	}
	if at := unix.CmsgLen(0); client.Addr().Is4() && more >= at+4 {
		clear(control[at : at+4]) // no interface: the routes choose it
	}
	_, _, _ = conn.WriteMsgUDPAddrPort(answer, control[:more], client) // if it fails, the client times out, and uses TCP
	return nil
}

// listenQUIC opens a UDP socket. If addr means all addresses, the socket reports to which address a packet was
// sent.
func listenQUIC(ctx context.Context, addr netip.AddrPort) (*net.UDPConn, error) {
	config := net.ListenConfig{Control: func(network, address string, conn syscall.RawConn) error {
		err := sockets.FreeBind(network, address, conn)
		if !addr.Addr().IsUnspecified() {
			return err
		}
		controlErr := conn.Control(func(fd uintptr) {
			level, option := unix.IPPROTO_IP, unix.IP_PKTINFO
			if addr.Addr().Is6() {
				level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
			}
			err = errors.Join(err, unix.SetsockoptInt(int(fd), level, option, 1)) //nolint:gosec // a descriptor
		})
		return errors.Join(controlErr, err)
	}}
	conn, err := config.ListenPacket(ctx, fmt.Sprintf("udp%d", family.Of(addr.Addr())), addr.String())
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}
