package upstream_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// F14, F20: a server that is not configured is asked, and not listed by Status. A server has one history, whether
// resolv.conf or a client names it.
func TestElsewhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		s := serve(t, truncating([]byte("whole")))
		c := client(t, upstream.Config{})
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
		refusing := fakedns.Start(t, fakedns.Silence, fakedns.NoUDP)
		if _, _, err := c.Elsewhere(refusing.Addr).Exchange(context.Background(), query(), upstream.UDPOnly); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Error(err)
		}
		configured := serve(t, answers(0))
		ask(t, c.Group(specs(configured), upstream.Options{}), 0)
		ask(t, c.Elsewhere(configured.addr), 0)
		if st := c.Status(); len(st) != 1 || st[0].Requests != 2 {
			t.Errorf("%+v", st)
		}
	})
}

// A place counts the queries that end for want of room.
type place struct{ crowded *atomic.Int64 }

func (p place) Receive(_ upstream.Answer, err error) {
	if errors.Is(err, upstream.ErrCrowded) {
		p.crowded.Add(1)
	}
}

// F20: queries for more servers than there may be sockets do not use all sockets, and a server that answers can be asked
// meanwhile.
func TestManyElsewhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		const servers, room = 1000, 256
		silent, err := net.ListenPacket("udp4", ":0") // on every address of 127.0.0.0/8, and never read
		if err != nil {
			t.Fatal(err)
		}
		defer silent.Close()
		port := netip.MustParseAddrPort(silent.LocalAddr().String()).Port()
		well := serve(t, answers(0))
		c := client(t, upstream.Config{})
		var crowded atomic.Int64
		for n := range servers {
			addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(n >> 8), byte(n)}), port)
			c.Elsewhere(addr).Start(query(), upstream.UDPOnly, place{&crowded})
			if n%100 == 0 {
				ask(t, c.Elsewhere(well.addr), 0)
			}
			if open := c.OpenElsewhere(); open > room+1 {
				t.Fatalf("%d sockets are open", open)
			}
		}
		ask(t, c.Elsewhere(well.addr), 0)
		c.Close() // the queries end
		if n := crowded.Load(); n < servers-room {
			t.Errorf("%d queries of %d have ended for want of room", n, servers)
		}
	})
}
