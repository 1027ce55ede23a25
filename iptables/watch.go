package iptables

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// A watch knows when the kernel last announced a change of nft rules, also one of nametap's. Its methods are safe
// for concurrent use.
type watch struct {
	started atomic.Bool
	changed atomic.Pointer[time.Time]
}

// start subscribes to changes of nft rules in this network namespace. works returns true from then on until follow
// ends.
func (w *watch) start() (announcer, error) {
	announced, err := watchRules()
	w.started.Store(err == nil)
	return announced, err
}

// follow calls changed after each change, until ctx ends or the kernel announces no more.
func (w *watch) follow(ctx context.Context, announced announcer, changed func()) error {
	defer w.started.Store(false)
	return announced.forward(ctx, func() {
		now := time.Now()
		w.changed.Store(&now)
		changed()
	})
}

// works reports whether the kernel announces changes.
func (w *watch) works() bool { return w.started.Load() }

// last returns when the last change was announced; zero if none was.
func (w *watch) last() (at time.Time) {
	if changed := w.changed.Load(); changed != nil {
		at = *changed
	}
	return at
}

// An announcer receives what the kernel announces about nft rules.
type announcer struct{ socket *nl.NetlinkSocket }

// watchRules subscribes to changes of nft rules in this network namespace.
func watchRules() (announcer, error) {
	socket, err := nl.Subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return announcer{}, fmt.Errorf("subscribing to changes of nft rules: %w", err)
	}
	return announcer{socket}, nil
}

// forward calls changed after each change, until ctx ends or the socket fails.
func (a announcer) forward(ctx context.Context, changed func()) error {
	defer context.AfterFunc(ctx, a.socket.Close)()
	for {
		announced, err := a.next()
		if err != nil {
			return err
		}
		if announced {
			changed()
		}
	}
}

// next waits for messages, and reports whether one announces the end of a change. If the kernel had no room for
// all messages, it returns true, because a lost message may have announced one.
func (a announcer) next() (bool, error) {
	messages, _, err := a.socket.Receive()
	if errors.Is(err, unix.ENOBUFS) {
		return true, nil
	}
	for _, m := range messages {
		if m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN {
			return true, nil
		}
	}
	return false, err
}
