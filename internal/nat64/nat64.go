// Package nat64 finds the NAT64 of a network by the answers of its nameservers (RFC 7050), and translates addresses for
// it (RFC 6052).
package nat64

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/chans"
)

// Name has IPv6 addresses only where a nameserver makes them for a NAT64.
const Name = "ipv4only.arpa"

// A lookup of Name may take the time timeout. A Finder keeps its result at least for the time hold, because the forwarder
// does not cache every negative answer. Follow repeats a lookup that has failed after the time soon, then less often.
const timeout, hold, soon = time.Second, time.Minute, 5 * time.Second

// ErrNone is the error of a lookup if nameservers say that there is no such address. Other errors say that they fail.
var ErrNone = errors.New("there are no such records")

// A Finder finds the prefixes of a network's NAT64. It is safe for concurrent use.
type Finder struct {
	resolve func(context.Context) ([]netip.Addr, error)
	renewed chan struct{}                // has a buffer of one
	used    atomic.Pointer[netip.Prefix] // see Prefix

	mu       sync.Mutex
	prefixes []netip.Prefix
	sure     bool      // the last lookup has not failed
	next     time.Time // when they are looked up again
}

// NewFinder returns a Finder; resolve returns the IPv6 addresses that nameservers have for [Name].
func NewFinder(resolve func(context.Context) ([]netip.Addr, error)) *Finder {
	return &Finder{resolve: resolve, renewed: make(chan struct{}, 1)}
}

// Find returns the prefixes, in the order of their addresses. The caller must not change them. If nameservers fail,
// these are the previous ones, and sure is false.
func (f *Finder) Find(ctx context.Context) (found []netip.Prefix, sure bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !time.Now().Before(f.next) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout) // other callers wait for the result, too
		defer cancel()
		addrs, err := f.resolve(ctx)
		kept := timeout
		if f.sure = err == nil || errors.Is(err, ErrNone); f.sure {
			f.prefixes, kept = prefixes(addrs), hold
		}
		f.next = time.Now().Add(kept)
	}
	return f.prefixes, f.sure
}

// Prefix returns the prefix that Follow has found; nil if there is none.
func (f *Finder) Prefix() *netip.Prefix { return f.used.Load() }

// Follow keeps the result of Prefix up to date until ctx ends. It calls useful, looks the prefixes up if that
// reports true, and does so again after the time that useful returns, or when nameservers have changed. While nameservers
// fail, it does so sooner. If useful is nil, there is no prefix.
func (f *Finder) Follow(ctx context.Context, useful func() (again time.Duration, use bool)) {
	for retry := soon; useful != nil && ctx.Err() == nil; {
		var used *netip.Prefix
		again, use := useful()
		if use {
			found, sure := f.Find(ctx)
			if len(found) > 0 {
				used = &found[0]
			}
			if sure {
				retry = soon
			} else {
				again, retry = min(again, retry), 2*retry
			}
		}
		f.used.Store(used)
		select {
		case <-ctx.Done():
		case <-time.After(again):
		case <-f.renewed:
			retry = soon
			f.mu.Lock()
			f.prefixes, f.next = nil, time.Time{}
			f.mu.Unlock()
		}
	}
}

// Renew says that nameservers may have changed.
func (f *Finder) Renew() { chans.Wake(f.renewed) }

// prefixes returns the prefixes of the addresses of [Name]. Each address contains one of two IPv4 addresses, at a place
// that follows from the length of the prefix. An address that is not IPv6, or is in ::/96, shows nothing.
func prefixes(addrs []netip.Addr) (found []netip.Prefix) {
	for _, addr := range addrs {
		for _, bits := range []int{96, 64, 56, 48, 40, 32} {
			prefix, v4 := netip.PrefixFrom(addr, bits).Masked(), Extract(addr, bits/8).As4()
			usable := prefix.Addr().IsGlobalUnicast() && (bits == 96 || addr.As16()[8] == 0)
			if usable && (v4 == [4]byte{192, 0, 0, 170} || v4 == [4]byte{192, 0, 0, 171}) {
				found = append(found, prefix)
				break
			}
		}
	}
	slices.SortFunc(found, netip.Prefix.Compare)
	return slices.Compact(found)
}

// places returns the indexes of the bytes of an IPv4 address within an IPv6 address, if the first is at offset. Byte 8 is
// no part of the IPv4 address (RFC 6052, section 2.2).
func places(offset int) (at [4]int) {
	for i := range at {
		if offset == 8 {
			offset++
		}
		at[i] = offset
		offset++
	}
	return at
}

// Extract returns the IPv4 address that is contained in an IPv6 address and begins at the byte with the index offset.
func Extract(a netip.Addr, offset int) netip.Addr {
	all, found := a.As16(), [4]byte{}
	for i, at := range places(offset) {
		found[i] = all[at]
	}
	return netip.AddrFrom4(found)
}

// Translate returns the address that leads to an IPv4 address through the NAT64 with a prefix. It reports false for
// addresses that mean something else there than here: of this host and link, multicast, and 240.0.0.0/4, which has the
// automatic VIPs.
func Translate(prefix netip.Prefix, v4 [4]byte) (translated [16]byte, ok bool) {
	if v4[0] == 0 || v4[0] == 127 || v4[0] >= 224 || v4[0] == 169 && v4[1] == 254 {
		return translated, false
	}
	translated = prefix.Addr().As16()
	for i, at := range places(prefix.Bits() / 8) {
		translated[at] = v4[i]
	}
	return translated, true
}

// Useful reports whether clients of this host should get addresses of a NAT64, and how soon this may change. On a host
// with IPv4 and global IPv6 addresses they should not: they would prefer the NAT64 to IPv4, which reaches more. With
// unique local addresses they prefer IPv4 (RFC 6724, section 2.1).
func Useful() (again time.Duration, use bool) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return hold, false
	}
	return usefulWith(addrs)
}

// usefulWith is Useful for a host with some addresses.
func usefulWith(addrs []net.Addr) (again time.Duration, use bool) {
	var v4, local, global bool
	for _, a := range addrs {
		prefix, _ := netip.ParsePrefix(a.String())
		addr := prefix.Addr()
		switch {
		case !addr.IsGlobalUnicast():
		case addr.Is4():
			v4 = true
		case addr.IsPrivate():
			local = true
		default:
			global = true
		}
	}
	if v4 && !local && !global { // there is no IPv6
		return time.Hour, true
	}
	return hold, !v4 || !global
}
