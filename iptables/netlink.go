package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// netlink is a socket to the kernel's netfilter: conntrack entries, and nft
// tables, neither of which iptables' own tools can delete. It belongs to one
// goroutine.
type netlink struct {
	fd  int
	seq uint32
}

// netlinkWait is for how long the kernel may take for one message.
const netlinkWait = 5 * time.Second

func dialNetlink() (*netlink, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	wait := unix.NsecToTimeval(int64(netlinkWait))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("setsockopt", err)
	}
	return &netlink{fd: fd}, nil
}

func (n *netlink) close() { _ = unix.Close(n.fd) }

// message makes one message of nfnetlink (linux/netfilter/nfnetlink.h): the
// header, the family, a resource number and attributes.
func (n *netlink) message(kind uint16, flags uint16, family uint8, rest ...[]byte) []byte {
	n.seq++
	b := make([]byte, unix.NLMSG_HDRLEN, 64)
	binary.NativeEndian.PutUint16(b[4:], kind)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|flags)
	binary.NativeEndian.PutUint32(b[8:], n.seq)
	b = append(b, family, unix.NFNETLINK_V0, 0, 0)
	for _, r := range rest {
		b = append(b, r...)
	}
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	return b
}

// exchange sends messages and hands every reply to each, until the kernel says
// that a dump is complete or acknowledges the last message of ours.
func (n *netlink) exchange(request []byte, each func(syscall.NetlinkMessage)) error {
	if err := unix.Sendto(n.fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	buffer := make([]byte, 1<<16)
	for {
		size, _, err := unix.Recvfrom(n.fd, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recvfrom", err)
		}
		messages, err := syscall.ParseNetlinkMessage(buffer[:size])
		if err != nil {
			return fmt.Errorf("parsing the kernel's reply: %w", err)
		}
		for _, m := range messages {
			if done, err := n.ended(m); done || err != nil {
				return err
			}
			if m.Header.Type != unix.NLMSG_ERROR {
				each(m)
			}
		}
	}
}

// ended says whether a message is the last reply to what was sent, and whether
// it is an error.
func (n *netlink) ended(m syscall.NetlinkMessage) (bool, error) {
	switch {
	case m.Header.Type == unix.NLMSG_DONE:
		return true, nil
	case m.Header.Type != unix.NLMSG_ERROR:
		return false, nil
	case len(m.Data) < 4:
		return true, fmt.Errorf("the kernel's reply has %d bytes, want 4", len(m.Data))
	}
	if code := int32(binary.NativeEndian.Uint32(m.Data)); code != 0 {
		return true, syscall.Errno(-code)
	}
	return m.Header.Seq == n.seq, nil
}

// number is the family's in the kernel, where AF_INET and NFPROTO_IPV4 are one.
func (f Family) number() uint8 {
	if f == IPv6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// attribute makes an attribute, padded.
func attribute(kind uint16, value []byte) []byte {
	b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
	b = binary.NativeEndian.AppendUint16(b, kind)
	b = append(b, value...)
	return append(b, make([]byte, -len(b)&3)...)
}

// attributes splits b into attributes by kind, without their flags.
func attributes(b []byte) map[uint16][]byte {
	as := make(map[uint16][]byte)
	for len(b) >= 4 {
		size := int(binary.NativeEndian.Uint16(b))
		if size < 4 || size > len(b) {
			break
		}
		as[binary.NativeEndian.Uint16(b[2:])&^uint16(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = b[4:size]
		b = b[min((size+3)&^3, len(b)):]
	}
	return as
}

// Messages of nf_tables (linux/netfilter/nf_tables.h).
const (
	nftGetGeneration  = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN
	nftDeleteTable    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	nfBatchGeneration = 1 // NFNL_BATCH_GENID
)

// nftGeneration returns the number that counts changes of nft rules.
func nftGeneration() (uint32, error) {
	n, err := dialNetlink()
	if err != nil {
		return 0, err
	}
	defer n.close()
	generation, found := uint32(0), false
	err = n.exchange(n.message(nftGetGeneration, unix.NLM_F_ACK, unix.AF_UNSPEC), func(m syscall.NetlinkMessage) {
		if len(m.Data) < 4 {
			return
		}
		if id := attributes(m.Data[4:])[unix.NFTA_GEN_ID]; len(id) == 4 {
			generation, found = binary.BigEndian.Uint32(id), true
		}
	})
	if err == nil && !found {
		err = errors.New("the kernel gave no generation of nft rules")
	}
	return generation, err
}

// generationNow returns nftGeneration, or 0 where the kernel has no nft or this process
// may not ask. It is not known if asking failed otherwise.
func generationNow() (generation uint32, known bool) {
	generation, err := nftGeneration()
	for _, lack := range []error{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EINVAL, unix.EPERM} {
		if errors.Is(err, lack) {
			return 0, true
		}
	}
	return generation, err == nil
}

// deleteNFTTable deletes a table and all that is in it, unless the rules of any
// table changed after generation: the kernel then refuses with ERESTART.
func deleteNFTTable(f Family, name string, generation uint32) error {
	n, err := dialNetlink()
	if err != nil {
		return err
	}
	defer n.close()
	id := binary.BigEndian.AppendUint32(nil, generation)
	begin := n.message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, attribute(nfBatchGeneration, id))
	remove := n.message(nftDeleteTable, unix.NLM_F_ACK, f.number(), attribute(unix.NFTA_TABLE_NAME, append([]byte(name), 0)))
	acknowledged := n.seq
	end := n.message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC)
	for _, m := range [][]byte{begin, end} {
		binary.BigEndian.PutUint16(m[unix.NLMSG_HDRLEN+2:], unix.NFNL_SUBSYS_NFTABLES)
	}
	n.seq = acknowledged
	batch := append(append(begin, remove...), end...)
	if err := n.exchange(batch, func(syscall.NetlinkMessage) {}); err != nil {
		return fmt.Errorf("deleting nft table %q: %w", name, err)
	}
	return nil
}
