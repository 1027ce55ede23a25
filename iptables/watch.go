package iptables

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// A watch knows when the kernel last announced a change of nft rules. The kernel also announces changes by nametap.
// Its methods are safe for concurrent use.
type watch struct {
	started atomic.Bool
	changed atomic.Pointer[time.Time]
}

// start subscribes to changes of nft rules in this network namespace. The caller passes the socket to
// [watch.follow]. If start returns no error, the method works returns true from now on, until follow ends.
func (w *watch) start() (*nl.NetlinkSocket, error) {
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	w.started.Store(err == nil)
	return socket, err
}

// follow calls the function changed after each change of nft rules, until ctx ends or the socket fails.
func (w *watch) follow(ctx context.Context, socket *nl.NetlinkSocket, changed func()) error {
	defer w.started.Store(false)
	defer context.AfterFunc(ctx, socket.Close)()
	for {
		messages, _, err := socket.Receive()
		// If the kernel had no room for all messages, a lost message may have announced a change.
		if errors.Is(err, unix.ENOBUFS) || slices.ContainsFunc(messages, isChange) {
			now := time.Now()
			w.changed.Store(&now)
			changed()
		} else if err != nil {
			return err
		}
	}
}

// isChange reports whether a message announces that a change is complete.
func isChange(m syscall.NetlinkMessage) bool {
	return m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN
}

// works reports whether the kernel announces changes.
func (w *watch) works() bool { return w.started.Load() }

// last returns when the last change was announced, or the zero time if none was.
func (w *watch) last() (at time.Time) {
	if changed := w.changed.Load(); changed != nil {
		at = *changed
	}
	return at
}
