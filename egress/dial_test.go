package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/nat64"
)

// A zone has the addresses of names. The records of a slow family come late.
type zone struct {
	addrs map[string][]string
	slow  family.Family
	late  time.Duration
}

func (z *zone) resolve(_ context.Context, name string, f family.Family, onlyCached bool) (addrs []netip.Addr, known bool, err error) {
	if z.late > 0 && f == z.slow {
		if onlyCached {
			return nil, false, nil
		}
		<-time.After(z.late)
	}
	for _, text := range z.addrs[name] {
		if addr := netip.MustParseAddr(text); family.Of(addr) == f {
			addrs = append(addrs, addr)
		}
	}
	if len(addrs) == 0 {
		return nil, true, errors.New("the name has no records")
	}
	return addrs, true, nil
}

// dialerOf returns a dialer that resolves names in z.
func dialerOf(z *zone) *dialer {
	cfg := &Config{Resolve: z.resolve}
	return &dialer{cfg, newFence(cfg), new(sync.WaitGroup)}
}

// E10: the addresses of a name are dialled with the families in turn, IPv6 first, and those of a slow lookup later. An
// address that does not answer delays the next one by 250 ms.
func TestOrder(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		slow   family.Family
		late   time.Duration
		silent string
		want   string
	}{
		"both are cached":     {want: "::a@0s 1.1.1.1@0s ::b@0s 1.1.1.2@0s 1.1.1.3@0s"},
		"IPv6 comes in time":  {slow: family.IPv6, late: 40 * time.Millisecond, want: "::a@40ms 1.1.1.1@40ms ::b@40ms 1.1.1.2@40ms 1.1.1.3@40ms"},
		"IPv6 comes late":     {slow: family.IPv6, late: time.Second, want: "1.1.1.1@50ms 1.1.1.2@50ms 1.1.1.3@50ms ::a@1s ::b@1s"},
		"IPv4 comes late":     {slow: family.IPv4, late: time.Second, want: "::a@50ms ::b@50ms 1.1.1.1@1s 1.1.1.2@1s 1.1.1.3@1s"},
		"one is silent":       {silent: "::a", want: "::a@0s 1.1.1.1@250ms ::b@250ms 1.1.1.2@250ms 1.1.1.3@250ms"},
		"all are silent":      {silent: "::a 1.1.1.1 ::b", want: "::a@0s 1.1.1.1@250ms ::b@500ms 1.1.1.2@750ms 1.1.1.3@750ms"},
		"another one is late": {slow: family.IPv4, late: 300 * time.Millisecond, silent: "::a", want: "::a@50ms ::b@300ms 1.1.1.1@300ms 1.1.1.2@300ms 1.1.1.3@300ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				d := dialerOf(&zone{addrs: map[string][]string{"a.example.org": {"1.1.1.1", "1.1.1.2", "1.1.1.3", "::a", "::b"}}, slow: test.slow, late: test.late})
				ctx, cancel := context.WithTimeout(t.Context(), connectTimeout)
				defer cancel()
				var mu sync.Mutex
				var dialled []string
				_, _, err := d.dial(ctx, []endpoint{{name: "a.example.org", port: 7}}, func(to netip.AddrPort) error {
					mu.Lock()
					dialled = append(dialled, fmt.Sprintf("%s@%v", to.Addr(), time.Since(began)))
					mu.Unlock()
					if strings.Contains(test.silent, to.Addr().String()) {
						<-ctx.Done()
					}
					return errors.New("refused")
				})
				d.running.Wait()
				if got := strings.Join(dialled, " "); err == nil || got != test.want {
					t.Errorf("%s, %v, want %s", got, err, test.want)
				}
			})
		})
	}
}

// E10: the errors of all attempts are in the text; a client that resets its connection ends the dial.
func TestDial(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	open := listener.Addr().(*net.TCPAddr).AddrPort()
	d := dialerOf(&zone{addrs: map[string][]string{"a.example.org": {"127.0.0.3", "127.0.0.1"}, "lost.example.org": {"127.0.0.3", "127.0.0.4"}}})
	allowed := func(netip.AddrPort) error { return nil }
	conn, to, err := d.dial(t.Context(), []endpoint{{name: "a.example.org", port: open.Port()}}, allowed)
	if err != nil || to != open {
		t.Fatal(to, err)
	}
	defer conn.Close()
	_, _, err = d.dial(t.Context(), []endpoint{{name: "lost.example.org", port: open.Port()}}, allowed)
	if r, ok := errors.AsType[*refusal](err); !ok || r.reason != ReasonConnect || strings.Count(err.Error(), "connection refused") != 2 {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if _, _, err = d.dial(ctx, []endpoint{{name: "a.example.org", port: 7}}, func(netip.AddrPort) error {
		cancel()
		<-ctx.Done()
		return nil
	}); err == nil {
		t.Error("a dial goes on after its client has gone")
	}
	d.running.Wait()
}

// E8: forbidden addresses are recognised in the form that the network's NAT64 gives them, and local translators may.
func TestNAT64(t *testing.T) {
	t.Parallel()
	z := &zone{addrs: map[string][]string{nat64.Name: {"2001:db8:64::c000:aa", "2001:db8:48:c000:0:ab00::"}}}
	f := newFence(&Config{Resolve: z.resolve})
	for addr, want := range map[string]string{
		"2001:db8:64::7f00:1":        "loopback",
		"2001:db8:64::a9fe:a9fe":     "link-local",
		"2001:db8:64::f0f0:1":        "an automatic VIP",
		"2001:db8:48:7f00:0:100::":   "loopback",
		"2001:db8:48:a9fe:a9:fe00::": "link-local",
		"2001:db8:64::a00:b":         "",
		"2001:db8:65::7f00:1":        "",
		"2001:db8:48:a00:0:b00::":    "",
		"64:ff9b::7f00:1":            "loopback",
		"2002:7f00:1::":              "loopback",
		"::ffff:0:7f00:1":            "loopback",
		// 169.254.169.254 and 198.51.100.1 in all forms of RFC 6052 that are below the prefix of RFC 8215.
		"64:ff9b:1:a9fe:a9:fe00::":       "link-local",
		"64:ff9b:1:a9fe:a9:fe00:808:808": "link-local", // translators ignore what follows
		"64:ff9b:1:2a9:fe:a9fe::":        "link-local",
		"64:ff9b:1:2:a9:fea9:fe00::":     "link-local",
		"64:ff9b:1:fffe::a9fe:a9fe":      "link-local",
		"64:ff9b:1:c633:64:100::":        "",
		"64:ff9b:1:2c6:33:6401::":        "",
		"64:ff9b:1:2:c6:3364:100::":      "",
		"64:ff9b:1:fffe::c633:6401":      "",
		"64:ff9b:1::c633:6401":           "",
	} {
		err := f.forbids(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(addr), 80), normally)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", addr, err, want)
		}
	}
}
