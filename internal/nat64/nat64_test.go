package nat64

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The prefixes and the addresses of RFC 6052, section 2.4.
func TestPrefixes(t *testing.T) { // A15, E8
	t.Parallel()
	for text, want := range map[string]string{
		"2001:db8::/32": "2001:db8:c000:221::", "2001:db8:100::/40": "2001:db8:1c0:2:21::",
		"2001:db8:122::/48": "2001:db8:122:c000:2:2100::", "2001:db8:122:300::/56": "2001:db8:122:3c0:0:221::",
		"2001:db8:122:344::/64": "2001:db8:122:344:c0:2:2100::", "2001:db8:122:344::/96": "2001:db8:122:344::c000:221",
	} {
		prefix := netip.MustParsePrefix(text)
		translated, _ := Translate(prefix, [4]byte{192, 0, 2, 33})
		if got := netip.AddrFrom16(translated); got != netip.MustParseAddr(want) || Extract(got, prefix.Bits()/8).String() != "192.0.2.33" {
			t.Errorf("%s: %s, want %s", prefix, got, want)
		}
		shown, _ := Translate(prefix, [4]byte{192, 0, 0, 171})
		if got := prefixes([]netip.Addr{netip.AddrFrom16(shown), netip.AddrFrom16(shown)}); !slices.Equal(got, []netip.Prefix{prefix}) {
			t.Errorf("%s shows %v", prefix, got)
		}
	}
	for _, text := range []string{"2001:db8::c000:a9", "2001:db8:c000:aa:100::", "2001:db8::1", "::c000:aa", "192.0.0.170", "fe80::c000:aa"} {
		if got := prefixes([]netip.Addr{netip.MustParseAddr(text)}); got != nil {
			t.Errorf("%s shows %v", text, got)
		}
	}
}

// A failing nameserver changes nothing and is asked again; other nameservers, or a reply without a prefix, end its use.
func TestFollow(t *testing.T) { // A15
	synctest.Test(t, func(t *testing.T) {
		reply := []netip.Addr{netip.MustParseAddr("64:ff9b::c000:aa")}
		silent, asked, failure := false, 0, error(nil)
		var mu sync.Mutex // guards these while time passes
		mu.Lock()
		f := NewFinder(func(ctx context.Context) ([]netip.Addr, error) {
			mu.Lock()
			asked++
			stays, addrs, err := silent, reply, failure
			mu.Unlock()
			if stays {
				<-ctx.Done()
			}
			return addrs, errors.Join(err, ctx.Err())
		})
		go f.Follow(t.Context(), func() (time.Duration, bool) { return hold, true })
		after := func(pause time.Duration, lookups int, found bool) {
			t.Helper()
			mu.Unlock()
			time.Sleep(pause) //nolint:forbidigo // of the bubble
			synctest.Wait()
			mu.Lock()
			if asked != lookups || (f.Prefix() != nil) != found {
				t.Errorf("prefix %v after %d lookups, want %t after %d", f.Prefix(), asked, found, lookups)
			}
		}
		after(hold/2, 1, true)
		silent = true
		after(hold, 4, true) // again after 5 and 10 s
		f.Renew()
		after(2*timeout, 5, false)
		silent, failure = false, errors.New("SERVFAIL")
		after(hold, 8, false)
		failure = nil
		f.Renew()
		after(hold/2, 9, true)
		reply, failure = nil, ErrNone
		after(hold, 10, false)
	})
}

func TestUseful(t *testing.T) { // A15
	t.Parallel()
	for texts, want := range map[string]string{
		"127.0.0.1/8 ::1/128 fe80::1/64 169.254.0.9/16 2001:db8::1/64": "1m0s true",
		"10.0.0.1/24 fe80::1/64 2001:db8::1/64":                        "1m0s false",
		"10.0.0.1/24 fd00::1/64":                                       "1m0s true",
		"10.0.0.1/24 ::1/128 fe80::1/64":                               "1h0m0s true",
	} {
		var addrs []net.Addr
		for _, text := range strings.Fields(texts) {
			prefix := netip.MustParsePrefix(text)
			addrs = append(addrs, &net.IPNet{IP: prefix.Addr().AsSlice(), Mask: net.CIDRMask(prefix.Bits(), prefix.Addr().BitLen())})
		}
		if got := fmt.Sprint(usefulWith(addrs)); got != want {
			t.Errorf("%s: %s, want %s", texts, got, want)
		}
	}
}
