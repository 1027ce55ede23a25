package upstream_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// F14: a server that is not configured is asked, and not listed by Status.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	s := serve(t, truncating([]byte("whole")))
	c := client(t, upstream.Config{Timeout: time.Second})
	for range 3 {
		got, _, err := c.Elsewhere(s.addr).Exchange(context.Background(), query(), upstream.UDPThenTCP)
		if err != nil || !strings.HasSuffix(string(got), "whole") {
			t.Fatalf("%x, %v", got, err)
		}
	}
	if n := s.connections(); n != 1 {
		t.Errorf("%d connections", n)
	}
	if st := c.Status(); len(st) > 0 {
		t.Errorf("remembered: %v", st)
	}
	s.udp.Close()
	if _, _, err := c.Elsewhere(s.addr).Exchange(context.Background(), query(), upstream.UDPOnly); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Error(err)
	}
}

// F20: a server has one history, whether resolv.conf or a client names it.
func TestElsewhereHasTheHistoryOfTheGroup(t *testing.T) {
	t.Parallel()
	s := serve(t, answers(0))
	c := client(t, upstream.Config{})
	ask(t, c.Group(specs(s), upstream.Options{}), 0)
	ask(t, c.Elsewhere(s.addr), 0)
	if st := c.Status(); len(st) != 1 || st[0].Requests < 2 {
		t.Errorf("%+v", st)
	}
}

// F20, R6: queries for more servers than there may be sockets use neither all sockets nor fill
// the log, and a server that answers can be asked meanwhile.
func TestManyElsewhere(t *testing.T) {
	t.Parallel()
	const servers = 3000
	silent, err := net.ListenPacket("udp4", ":0") // on every address of 127.0.0.0/8, and never read
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	port := netip.MustParseAddrPort(silent.LocalAddr().String()).Port()
	well := serve(t, answers(0))
	var logged testlog.Buffer
	c := client(t, upstream.Config{Timeout: 3 * time.Second, Logger: logged.Logger()})
	var asking sync.WaitGroup
	began := time.Now()
	for n := range servers {
		addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(n >> 8), byte(n)}), port)
		asking.Go(func() {
			for range 3 {
				if got, _, err := c.Elsewhere(addr).Exchange(context.Background(), query(), upstream.UDPOnly); err == nil {
					t.Errorf("%v: %x", addr, got)
				}
			}
		})
		if n%100 == 0 {
			ask(t, c.Elsewhere(well.addr), 0)
		}
	}
	asking.Wait()
	ask(t, c.Elsewhere(well.addr), 0)
	if n, most := logged.Count("level="), int(time.Since(began).Seconds())+2; n > most {
		t.Errorf("%d lines, want at most %d", n, most)
	}
}
