package resolved

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// The function NativeEndian (in version 1.3.1 of netlink) determines the byte order at the first call, without a lock.
// So it is first called here, before any goroutine starts.
var _ = nl.NativeEndian()

// LinkName is the name of the network interface that is registered.
const LinkName = "nametap-dns"

// linkAddr is the address of the interface. It is a loopback address, because programs that look for addresses of
// this host skip loopback addresses. It has the scope "site": systemd-resolved ignores interfaces whose addresses
// have the scope "link" or "host", and the kernel never chooses an address of the scope "site" as the source of a
// packet to another host.
func linkAddr() [4]byte { return [4]byte{127, 15, 53, 1} }

// The range of the indexes of interfaces that nametap creates. The kernel numbers other interfaces from 1.
const lowestIndex, highestIndex = 1 << 20, 1 << 30

// errForeign is returned if another program has made an interface with the name LinkName.
var errForeign = errors.New("another program has made the interface " + LinkName + ": rename or delete it")

// findLink returns the index of the interface, 0 if there is none.
func findLink() (int, error) {
	links, err := net.Interfaces()
	if err != nil {
		return 0, fmt.Errorf("looking for the interface %s: %w", LinkName, err)
	}
	i := slices.IndexFunc(links, func(link net.Interface) bool { return link.Name == LinkName })
	switch {
	case i < 0:
		return 0, nil
	case links[i].Index < lowestIndex:
		return 0, errForeign
	}
	return links[i].Index, nil
}

// makeLink creates the interface, or completes it, and returns its index, and whether it was created.
//
// systemd-resolved identifies interfaces only by their index, and may run in another network namespace than the
// agent. There, another interface could have the same index, so the index is random: if systemd-resolved knows an
// interface with this index, it is this interface.
func makeLink() (index int, created bool, err error) {
	index, err = findLink()
	if created = err == nil && index == 0; created {
		index, err = createLink()
	}
	if err == nil {
		err = configureLink(index)
	}
	if err != nil {
		err = fmt.Errorf("creating the interface %s: %w", LinkName, err)
	}
	return index, created, err
}

// createLink creates the interface.
func createLink() (int, error) {
	index := lowestIndex + rand.IntN(highestIndex-lowestIndex) //nolint:gosec // against accidents only
	var err error
	for _, kind := range []string{"dummy", "ifb"} { // neither carries a packet; a kernel may lack one of them
		info := nl.NewRtAttr(unix.IFLA_LINKINFO|unix.NLA_F_NESTED, nil)
		info.AddRtAttr(unix.IFLA_INFO_KIND, []byte(kind))
		err = routeRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
			linkHeader(index, 0), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(LinkName)), info)
		if !errors.Is(err, unix.EOPNOTSUPP) {
			break
		}
	}
	if err == nil { // without a link-local IPv6 address; fails if this host has no IPv6
		families := nl.NewRtAttr(unix.IFLA_AF_SPEC|unix.NLA_F_NESTED, nil)
		families.AddRtAttr(unix.AF_INET6|unix.NLA_F_NESTED, nil).
			AddRtAttr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{nl.IN6_ADDR_GEN_MODE_NONE})
		_ = routeRequest(unix.RTM_NEWLINK, 0, linkHeader(index, 0), families)
	}
	return index, err
}

// configureLink gives the interface its address and sets it up. It is no error if the interface has the address
// already or is up.
func configureLink(index int) error {
	addr := linkAddr()
	header := nl.NewIfAddrmsg(unix.AF_INET)
	header.Prefixlen, header.Flags, header.Scope = 8*uint8(len(addr)), unix.IFA_F_PERMANENT, unix.RT_SCOPE_SITE
	header.Index = uint32(index) //nolint:gosec // positive
	err := routeRequest(unix.RTM_NEWADDR, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, header,
		nl.NewRtAttr(unix.IFA_LOCAL, addr[:]), nl.NewRtAttr(unix.IFA_ADDRESS, addr[:]))
	if err != nil {
		return err
	}
	return routeRequest(unix.RTM_NEWLINK, 0, linkHeader(index, unix.IFF_UP))
}

// RemoveLink deletes the interface, if nametap has made it. Then systemd-resolved forgets the registration.
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

// linkHeader returns the header of a request about an interface. The request sets the given flags of the interface.
func linkHeader(index int, flags uint32) *nl.IfInfomsg {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index, header.Flags, header.Change = int32(index), flags, flags //nolint:gosec // below highestIndex
	return header
}

// routeRequest sends a request to the kernel (rtnetlink(7)) and returns the error. Package netlink has
// functions for these requests, but would make the agent's binary 300 KB larger.
func routeRequest(kind, flags int, data ...nl.NetlinkRequestData) error {
	request := nl.NewNetlinkRequest(kind, unix.NLM_F_ACK|flags)
	request.Data = data
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
