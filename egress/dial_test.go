package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/nat64"
)

// A zone has the addresses of names. The records of a slow family come when the channel is closed.
type zone struct {
	addrs map[string][]string
	slow  family.Family
	come  chan struct{}
}

func (z *zone) resolve(_ context.Context, name string, f family.Family, onlyCached bool) (addrs []netip.Addr, known bool, err error) {
	if z.come != nil && f == z.slow {
		if onlyCached {
			return nil, false, nil
		}
		<-z.come
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

// A dialTask is a task of a loop whose clock stands still, unless jumping is true: then it jumps to the next timer while
// only one connection is open.
type dialTask struct {
	*task
	*dialer

	clock   *stillClock
	jumping bool
}

// inLoop runs f as a task of a loop, with a dialer that resolves names in z.
func inLoop(t *testing.T, z *zone, f func(*dialTask)) {
	t.Helper()
	l, err := newLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.end()
	cfg := Config{Resolve: z.resolve}
	ended := false
	d := &dialTask{dialer: &dialer{&cfg, newGuard(&cfg), 10}, clock: stand(l)}
	l.start(func(tk *task) {
		d.task = tk
		f(d)
		ended = true
	})
	if err := l.run(func() bool {
		if d.jumping && len(l.sockets) == 2 { // with the loop's own
			d.clock.jump()
		}
		return ended
	}); err != nil {
		t.Fatal(err)
	}
}

// E10: the addresses of a name are dialled with the families in turn, IPv6 first, and those of a slow lookup later.
func TestOrder(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		slow         family.Family
		isSlow, late bool
		want         string
	}{
		"both are cached":    {want: "::a 1.1.1.1 ::b 1.1.1.2 1.1.1.3"},
		"IPv6 comes in time": {slow: family.IPv6, isSlow: true, want: "::a 1.1.1.1 ::b 1.1.1.2 1.1.1.3"},
		"IPv6 comes late":    {slow: family.IPv6, isSlow: true, late: true, want: "1.1.1.1 1.1.1.2 1.1.1.3 ::a ::b"},
		"IPv4 comes late":    {slow: family.IPv4, isSlow: true, late: true, want: "::a ::b 1.1.1.1 1.1.1.2 1.1.1.3"},
	} {
		z := &zone{addrs: map[string][]string{"a.example.org": {"1.1.1.1", "1.1.1.2", "1.1.1.3", "::a", "::b"}}, slow: test.slow}
		if test.isSlow {
			z.come = make(chan struct{})
		}
		inLoop(t, z, func(d *dialTask) {
			until := d.now.Add(time.Hour)
			r := &dialing{dialer: d.dialer, task: d.task, alternate: true}
			defer r.giveUp()
			r.lookUp([]endpoint{{name: "a.example.org", port: 7}}, until)
			var got []string
			take := func() int {
				r.release()
				for _, addr := range r.addrs {
					got = append(got, addr.Addr().String())
				}
				r.addrs = nil
				return len(got)
			}
			if test.isSlow && take() > 0 {
				t.Errorf("%s: the addresses of one family do not wait for the other", name)
			}
			if test.late {
				if wake := r.wakeTime(until); wake.Sub(d.now) != 50*time.Millisecond {
					t.Errorf("%s: the addresses of one family wait for %v, want %v", name, wake.Sub(d.now), 50*time.Millisecond)
				}
				d.clock.time = d.now.Add(50 * time.Millisecond)
				if err := d.wait(d.clock.time); err != nil || take() == 0 {
					t.Errorf("%s: the addresses of one family wait for longer: %v", name, err)
				}
			}
			if test.isSlow {
				close(z.come)
			}
			for r.lookups > 0 {
				if err := d.wait(time.Time{}); err != nil {
					t.Error(err)
					return
				}
			}
			take()
			if text := strings.Join(got, " "); text != test.want {
				t.Errorf("%s: %s, want %s", name, text, test.want)
			}
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
	inLoop(t, z, func(d *dialTask) {
		began := d.now
		d.jumping = true
		conn, to, err := d.dial(d.task, []endpoint{{name: "a.example.org", port: open.Port()}}, true, began.Add(connectTimeout))
		d.jumping = false
		if err != nil {
			t.Error(err)
			return
		}
		d.close(conn)
		if took := d.now.Sub(began); to != open || took != 250*time.Millisecond {
			t.Errorf("%s after %v", to, took)
		}
		_, _, err = d.dial(d.task, []endpoint{{name: "lost.example.org", port: open.Port()}}, true, d.now.Add(connectTimeout))
		if r, ok := errors.AsType[*refusal](err); !ok || r.reason != ReasonConnect || strings.Count(err.Error(), "connection refused") != 2 {
			t.Errorf("%v", err)
		}
		d.jumping = true
		if _, _, err = d.dial(d.task, []endpoint{{addr: netip.MustParseAddr(full), port: open.Port()}}, true, d.now.Add(attemptDelay)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("an address that does not answer: %v", err)
		}
		if len(d.sockets) != 1 || d.extra != 10 { // the loop's own
			t.Errorf("%d sockets and %d attempts are left", len(d.sockets), d.extra)
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
	if err := raw.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) }); err != nil {
		t.Fatal(err)
	}
	conn, err := net.Dial("tcp", listener.Addr().String()) // one fills the shortest queue
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return addr
}

// E8: forbidden addresses are recognised in the form that the network's NAT64 gives them.
func TestNAT64(t *testing.T) {
	t.Parallel()
	z := &zone{addrs: map[string][]string{nat64.Name: {"2001:db8:64::c000:aa", "2001:db8:48:c000:0:ab00::"}}}
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
}
