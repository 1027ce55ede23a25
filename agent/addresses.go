package agent

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// watchAddresses sends to all channels, which have a buffer, after an address of an interface was
// added or removed, until ctx ends. It does not say which one: the receivers read all
// addresses, so one value in the buffer is enough for any number of changes.
func watchAddresses(ctx context.Context, changed ...chan<- struct{}) error {
	socket, err := routeSocket()
	if err != nil {
		return fmt.Errorf("watching the addresses of the interfaces: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = socket.Close() }) // ends Read
	defer func() {
		if stop() {
			_ = socket.Close()
		}
	}()
	buffer := make([]byte, os.Getpagesize())
	for {
		_, err := socket.Read(buffer)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !errors.Is(err, unix.ENOBUFS): // ENOBUFS: the kernel dropped messages
			return fmt.Errorf("watching the addresses of the interfaces: %w", err)
		}
		for _, to := range changed {
			select {
			case to <- struct{}{}:
			default:
			}
		}
	}
}

// routeSocket opens a netlink socket (rtnetlink(7)) that receives the changes of addresses of
// both families. It is not a [conntrack.Conn], which speaks to netfilter and sends requests.
func routeSocket() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	groups := &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: unix.RTMGRP_IPV4_IFADDR | unix.RTMGRP_IPV6_IFADDR}
	if err := unix.Bind(fd, groups); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	return os.NewFile(uintptr(fd), "rtnetlink"), nil
}
