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

	"github.com/nametap/nametap/internal/conntrack"
)

// A watch knows when the kernel last announced a change of nft rules. The kernel also announces changes by nametap.
// Its methods are safe for concurrent use.
type watch struct {
	subscribed atomic.Bool
	changed    atomic.Pointer[time.Time]
}

// start subscribes to changes of nft rules in this network namespace. The caller passes the socket to [watch.run]. If
// start returns no error, isRunning returns true until run ends.
func (w *watch) start() (*nl.NetlinkSocket, error) {
	socket, err := conntrack.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	w.subscribed.Store(err == nil)
	return socket, err
}

// run calls notify after each change of nft rules, until ctx ends or the socket fails.
func (w *watch) run(ctx context.Context, socket *nl.NetlinkSocket, notify func()) error {
	defer w.subscribed.Store(false)
	defer context.AfterFunc(ctx, socket.Close)()
	for {
		messages, _, err := socket.Receive()
		// If the kernel had no room for all messages, a lost message may have announced a change.
		if errors.Is(err, unix.ENOBUFS) || slices.ContainsFunc(messages, isChange) {
			now := time.Now()
			w.changed.Store(&now)
			notify()
		} else if err != nil {
			return err
		}
	}
}

// isChange reports whether a message announces that a change is complete.
func isChange(m syscall.NetlinkMessage) bool {
	return m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN
}

// isRunning reports whether the kernel announces changes.
func (w *watch) isRunning() bool { return w.subscribed.Load() }

// lastChange returns when the last change was announced, or the zero time if none was.
func (w *watch) lastChange() (t time.Time) {
	if changed := w.changed.Load(); changed != nil {
		t = *changed
	}
	return t
}
