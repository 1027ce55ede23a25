package iptables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// LeaseTime is how long the rules with a lease match after the last [Capture.Renew]. The kernel counts it
// in seconds.
const LeaseTime = 2 * time.Second

// Set returns the name of the ipset that holds the lease of a family: while it has its elements, the rules
// of the family match. The elements expire, so the kernel ends the capture by itself when no agent renews
// the lease.
func (f Family) Set() string { return ownPrefix + strings.ToUpper(f.String()) }

// everywhere returns two prefixes that hold all addresses of a family. An ipset has no prefix of length 0.
func (f Family) everywhere() [2]netip.Prefix {
	if f == IPv4 {
		return [2]netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{}), 1), netip.PrefixFrom(netip.AddrFrom4([4]byte{128}), 1)}
	}
	return [2]netip.Prefix{netip.PrefixFrom(netip.IPv6Unspecified(), 1), netip.PrefixFrom(netip.AddrFrom16([16]byte{128}), 1)}
}

// A lease renews the leases of both families. The zero value is ready for use. Its methods are safe for
// concurrent use.
type lease struct {
	mu      sync.Mutex
	socket  *nl.NetlinkSocket    // opened by the first renewal, nil after an error
	renewed map[Family]time.Time // the last renewals
}

// alive reports whether the lease of a family was renewed in time.
func (l *lease) alive(f Family) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.aliveLocked(f)
}

func (l *lease) aliveLocked(f Family) bool {
	renewed, ok := l.renewed[f]
	return ok && time.Since(renewed) < LeaseTime
}

// makeSet makes the set of a family, without elements, unless it exists. The error is an [errExtension] if
// the kernel has no such sets.
func makeSet(f Family) error {
	request := ipsetRequest(nl.IPSET_CMD_CREATE, f)
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_TYPENAME, nl.ZeroTerminated("hash:net")))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_REVISION, nl.Uint8Attr(0)))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_FAMILY, nl.Uint8Attr(f.number())))
	options := nl.NewRtAttr(nl.IPSET_ATTR_DATA|unix.NLA_F_NESTED, nil)
	options.AddChild(timeout())
	request.AddData(options)
	err := executeIPSet(request)
	switch {
	case err == nil:
		return nil
	case noSet(err), errors.Is(err, syscall.Errno(nl.IPSET_ERR_FIND_TYPE)):
		err = fmt.Errorf("%w (%w): load the kernel's modules (modprobe -a ip_set ip_set_hash_net xt_set)", errExtension, err)
	case errors.Is(err, unix.EEXIST):
		err = fmt.Errorf("another program has a set of this name (`ipset destroy %s` removes it): %w", f.Set(), err)
	}
	return fmt.Errorf("making the ipset %s: %w", f.Set(), err)
}

// destroySet removes the set of a family. It is no error if there is none, or if rules of the other backend
// still use it.
func destroySet(f Family) error {
	err := executeIPSet(ipsetRequest(nl.IPSET_CMD_DESTROY, f))
	if err == nil || noSet(err) || errors.Is(err, syscall.Errno(nl.IPSET_ERR_BUSY)) {
		return nil
	}
	return fmt.Errorf("removing the ipset %s: %w", f.Set(), err)
}

// endLease ends the lease of a family at once. It is no error if there is none.
func endLease(f Family) error {
	err := executeIPSet(ipsetRequest(nl.IPSET_CMD_FLUSH, f))
	if err == nil || noSet(err) {
		return nil
	}
	return fmt.Errorf("ending the lease of the capture rules (ipset %s): %w", f.Set(), err)
}

// Leased reports whether the lease of a family has time left.
func Leased(f Family) (bool, error) {
	request := ipsetRequest(nl.IPSET_CMD_TEST, f)
	request.AddData(element(f.everywhere()[0]))
	err := executeIPSet(request)
	if noSet(err) || errors.Is(err, syscall.Errno(nl.IPSET_ERR_EXIST)) {
		return false, nil
	}
	return err == nil, err
}

// noSet reports whether an error says that there is no set: it does not exist, the kernel has no sets, or
// this process may not see any.
func noSet(err error) bool {
	return isAny(err, unix.ENOENT, unix.EINVAL, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EPERM)
}

// renew sets the time that is left to [LeaseTime], and reports whether there may have been none.
func (l *lease) renew(f Family) (begins bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.socket == nil {
		socket, err := nl.Subscribe(unix.NETLINK_NETFILTER)
		if err != nil {
			return false, fmt.Errorf("renewing the lease of the capture rules: %w", err)
		}
		l.socket = socket
	}
	request := ipsetRequest(nl.IPSET_CMD_ADD, f)
	request.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_NETFILTER: {Socket: l.socket}}
	request.AddData(&nl.Uint32Attribute{Type: nl.IPSET_ATTR_LINENO | nl.NLA_F_NET_BYTEORDER, Value: 1})
	elements := nl.NewRtAttr(nl.IPSET_ATTR_ADT|unix.NLA_F_NESTED, nil)
	for _, p := range f.everywhere() {
		elements.AddChild(element(p))
	}
	request.AddData(elements)
	if _, err := request.Execute(unix.NETLINK_NETFILTER, 0); err != nil {
		l.socket.Close()
		l.socket = nil
		return false, fmt.Errorf("renewing the lease of the capture rules (ipset %s): %w", f.Set(), err)
	}
	begins = !l.aliveLocked(f)
	if l.renewed == nil {
		l.renewed = make(map[Family]time.Time)
	}
	l.renewed[f] = time.Now()
	return begins, nil
}

// close closes the socket.
func (l *lease) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.socket != nil {
		l.socket.Close()
		l.socket = nil
	}
}

// executeIPSet executes a request on a socket of its own.
func executeIPSet(request *nl.NetlinkRequest) error {
	_, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

// ipsetRequest returns a request about the set of a family.
func ipsetRequest(command int, f Family) *nl.NetlinkRequest {
	request := nl.NewNetlinkRequest(command|unix.NFNL_SUBSYS_IPSET<<8, nl.GetIpsetFlags(command))
	request.AddData(&nl.Nfgenmsg{NfgenFamily: f.number(), Version: nl.NFNETLINK_V0})
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	request.AddData(nl.NewRtAttr(nl.IPSET_ATTR_SETNAME, nl.ZeroTerminated(f.Set())))
	return request
}

// element returns a prefix as an element that lives for [LeaseTime].
func element(p netip.Prefix) *nl.RtAttr {
	kind := nl.IPSET_ATTR_IPADDR_IPV4
	if p.Addr().Is6() {
		kind = nl.IPSET_ATTR_IPADDR_IPV6
	}
	address := nl.NewRtAttr(kind|int(nl.NLA_F_NET_BYTEORDER), p.Addr().AsSlice())
	e := nl.NewRtAttr(nl.IPSET_ATTR_DATA|unix.NLA_F_NESTED, nil)
	e.AddChild(nl.NewRtAttr(nl.IPSET_ATTR_IP|unix.NLA_F_NESTED, address.Serialize()))
	e.AddChild(nl.NewRtAttr(nl.IPSET_ATTR_CIDR, nl.Uint8Attr(uint8(p.Bits())))) //nolint:gosec // 0 to 128
	e.AddChild(timeout())
	return e
}

// timeout returns LeaseTime as an attribute.
func timeout() *nl.RtAttr {
	return nl.NewRtAttr(nl.IPSET_ATTR_TIMEOUT|int(nl.NLA_F_NET_BYTEORDER), binary.BigEndian.AppendUint32(nil, uint32(LeaseTime/time.Second)))
}
