package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/conntrack"
)

// InstanceIPs returns the addresses of the node. The list begins with the address preferred, if that is valid. Then
// come the global addresses of the interfaces, in the order of the kernel. The control plane sends the node only
// addresses of the families that occur in this list.
func InstanceIPs(preferred netip.Addr) ([]netip.Addr, error) {
	var ips []netip.Addr
	if preferred.IsValid() {
		ips = append(ips, preferred.Unmap())
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("reading the addresses of the interfaces: %w", err)
	}
	for _, addr := range addrs {
		prefix, err := netip.ParsePrefix(addr.String())
		if err != nil {
			continue // an address of neither family
		}
		if ip := prefix.Addr().Unmap(); ip.IsGlobalUnicast() && !slices.Contains(ips, ip) {
			ips = append(ips, ip)
		}
	}
	if len(ips) == 0 {
		// A control plane needs an address in the identity of a node, even if the host has
		// only loopback addresses.
		ips = append(ips, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	return ips, nil
}

// watchAddresses follows the addresses of the interfaces until ctx ends. After an address was added or removed, it
// sends a value to each of the channels in the parameter changed. Each channel must have a buffer for one value. One
// value is enough for any number of changes, because its receiver reads all addresses.
func watchAddresses(ctx context.Context, changed ...chan<- struct{}) error {
	socket, err := conntrack.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return fmt.Errorf("watching the addresses of the interfaces: %w", err)
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, socket.Close)() // ends Receive
	for {
		_, _, err := socket.Receive()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !errors.Is(err, unix.ENOBUFS): // ENOBUFS: the kernel dropped messages
			return fmt.Errorf("watching the addresses of the interfaces: %w", err)
		}
		for _, to := range changed {
			chans.Wake(to)
		}
	}
}
