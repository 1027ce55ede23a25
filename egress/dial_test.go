package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
)

// A zone has the addresses of names, and how long each family takes.
type zone struct {
	addrs map[string][]string
	takes map[family.Family]time.Duration
	asked atomic.Int64 // for nat64Name
}

func (z *zone) resolve(_ context.Context, name string, f family.Family, onlyCached bool) (addrs []netip.Addr, known bool, err error) {
	if name == nat64Name {
		z.asked.Add(1)
	}
	if onlyCached && z.takes[f] > 0 {
		return nil, false, nil
	}
	time.Sleep(z.takes[f]) //nolint:forbidigo // as a nameserver does
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

// inLoop runs f as a task of a loop, with a dialer that resolves names in z.
func inLoop(t *testing.T, z *zone, f func(*task, *dialer)) {
	t.Helper()
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.end()
	cfg := Config{Resolve: z.resolve}
	ended := false
	l.start(func(tk *task) {
		f(tk, &dialer{&cfg, newGuard(&cfg), 10})
		ended = true
	})
	if err := l.run(func() bool { return ended }); err != nil {
		t.Fatal(err)
	}
}

// E10: the addresses of a name are dialled with the families in turn, IPv6 first, and those of a slow lookup later.
func TestOrder(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		takes map[family.Family]time.Duration
		want  string
		after time.Duration
	}{
		"both are cached":     {nil, "::a 1.1.1.1 ::b 1.1.1.2 1.1.1.3", 0},
		"IPv6 takes a little": {map[family.Family]time.Duration{family.IPv6: resolutionDelay / 5}, "::a 1.1.1.1 ::b 1.1.1.2 1.1.1.3", resolutionDelay / 5},
		"IPv6 takes long":     {map[family.Family]time.Duration{family.IPv6: 10 * resolutionDelay}, "1.1.1.1 1.1.1.2 1.1.1.3 ::a ::b", resolutionDelay},
		"IPv4 takes long":     {map[family.Family]time.Duration{family.IPv4: 10 * resolutionDelay}, "::a ::b 1.1.1.1 1.1.1.2 1.1.1.3", resolutionDelay},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			z := &zone{addrs: map[string][]string{"a.example.org": {"1.1.1.1", "1.1.1.2", "1.1.1.3", "::a", "::b"}}, takes: test.takes}
			inLoop(t, z, func(tk *task, d *dialer) {
				began := tk.now
				until := began.Add(connectTimeout)
				r := &dialing{dialer: d, task: tk, alternate: true}
				defer r.giveUp()
				r.lookUp([]endpoint{{name: "a.example.org", port: 7}}, until)
				var got []string
				for {
					r.release()
					if len(got) == 0 && len(r.addrs) > 0 && tk.now.Sub(began) < test.after {
						t.Errorf("the first address after %v, want %v", tk.now.Sub(began), test.after)
					}
					for _, addr := range r.addrs {
						got = append(got, addr.Addr().String())
					}
					if r.addrs = nil; r.lookups+len(r.heldAddrs) == 0 {
						break
					}
					if err := tk.wait(r.wakeTime(until)); err != nil {
						t.Error(err)
						break
					}
				}
				if text := strings.Join(got, " "); text != test.want {
					t.Errorf("%s, want %s", text, test.want)
				}
			})
		})
	}
}

// E10: an address that does not answer delays the next one by 250 ms only; all errors are in the text.
func TestDial(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	open := listener.Addr().(*net.TCPAddr).AddrPort()
	full := fullListener(t, open.Port())
	z := &zone{addrs: map[string][]string{"a.example.org": {full, "127.0.0.1"}, "lost.example.org": {"127.0.0.3", "127.0.0.4"}}}
	inLoop(t, z, func(tk *task, d *dialer) {
		began := tk.now
		conn, to, err := d.dial(tk, []endpoint{{name: "a.example.org", port: open.Port()}}, true, began.Add(connectTimeout))
		if err != nil {
			t.Error(err)
			return
		}
		tk.close(conn)
		if took := tk.now.Sub(began); to != open || took < attemptDelay || took > 4*attemptDelay {
			t.Errorf("%s after %v", to, took)
		}
		_, _, err = d.dial(tk, []endpoint{{name: "lost.example.org", port: open.Port()}}, true, tk.now.Add(connectTimeout))
		if r, ok := errors.AsType[*refusal](err); !ok || r.reason != ReasonConnect || strings.Count(err.Error(), "connection refused") != 2 {
			t.Errorf("%v", err)
		}
		if _, _, err = d.dial(tk, []endpoint{{addr: netip.MustParseAddr(full), port: open.Port()}}, true, tk.now.Add(attemptDelay)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("an address that does not answer: %v", err)
		}
		if len(tk.sockets) != 1 || d.extra != 10 { // the loop's own
			t.Errorf("%d sockets and %d attempts are left", len(tk.sockets), d.extra)
		}
	})
}

// fullListener returns an address at which connections to a port have no answer.
func fullListener(t *testing.T, port uint16) string {
	t.Helper()
	const addr = "127.0.0.2"
	listener, err := net.Listen("tcp", fmt.Sprintf("%s:%d", addr, port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	raw, err := listener.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = listenBacklog(int(fd)) }); err != nil {
		t.Fatal(err)
	}
	for { // until the queue is full
		conn, err := net.DialTimeout("tcp", listener.Addr().String(), 100*time.Millisecond)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { conn.Close() })
	}
}

// E8: forbidden addresses are recognised in the form that the network's NAT64 gives them, which is asked for IPv6 only.
func TestNAT64(t *testing.T) {
	t.Parallel()
	z := &zone{addrs: map[string][]string{nat64Name: {"2001:db8:64::c000:aa", "2001:db8:48:c000:0:ab00::"}}}
	g := newGuard(&Config{Resolve: z.resolve})
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
	} {
		err := g.forbids(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(addr), 80))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", addr, err, want)
		}
	}
	if asked := z.asked.Load(); asked != 1 {
		t.Errorf("%s was looked up %d times, want once", nat64Name, asked)
	}
	g = newGuard(&Config{Resolve: z.resolve})
	if err := g.forbids(t.Context(), netip.MustParseAddrPort("192.0.2.1:80")); err != nil || z.asked.Load() != 1 {
		t.Errorf("IPv4: %v, looked up %d times in all", err, z.asked.Load())
	}
}

// listenBacklog makes the queue of a listening socket as short as possible.
func listenBacklog(fd int) error { return unix.Listen(fd, 0) }
