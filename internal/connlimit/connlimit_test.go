package connlimit_test

import (
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nametap/nametap/internal/connlimit"
)

// A conn is a connection of a client.
type conn struct {
	net.Conn
	client string
	closed bool
}

func (c *conn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.ParseIP(c.client), Port: 1} }

func (c *conn) Close() error {
	c.closed = true
	return nil
}

// pass lets time pass.
func pass(d time.Duration) { time.Sleep(d) } //nolint:forbidigo // the bubble's clock

// TestEviction checks which of three connections makes room when a fourth one comes, when memory runs out, and when
// descriptors do.
func TestEviction(t *testing.T) { // R23
	type place = *connlimit.Place
	for name, test := range map[string]struct {
		clients                  [3]string
		use                      func(first, second, third place)
		conns, bytes, descriptor int // index of the evicted connection, -1 for none
	}{
		"the client that is awaited longest": {[3]string{"192.0.2.1", "192.0.2.2", "192.0.2.2"}, func(first, second, third place) {
			pass(time.Hour)
			first.Await() // it has read a part
			third.Serve()
			second.Hold(1)
		}, 1, 1, 1},
		"one of the client with the most": {[3]string{"192.0.2.1", "2001:db8::1", "2001:db8::2"}, func(first, second, third place) {
			first.Serve()
			pass(time.Hour)
			third.Serve()
			pass(time.Hour)
			second.Serve()
			first.Hold(1)
		}, 2, 0, 2},
		"new ones last": {[3]string{"192.0.2.1", "127.0.0.2", "127.9.8.7"}, func(first, second, _ place) {
			first.Hold(2)
			second.Serve()
			second.Hold(1)
		}, 2, 0, -1},
		"new ones for their descriptor": {[3]string{"192.0.2.1", "192.0.2.2", "192.0.2.2"}, func(_, second, _ place) {
			pass(900 * time.Millisecond)
			second.Hold(1)
		}, 1, 1, 1},
	} {
		for kind, want := range []int{test.conns, test.bytes, test.descriptor} {
			synctest.Test(t, func(t *testing.T) {
				limit := connlimit.New("test", 3, 10)
				defer limit.Close()
				var conns [3]conn
				var places [3]place
				for i, client := range test.clients {
					conns[i].client = client
					places[i] = limit.Enter(&conns[i])
					pass(time.Millisecond)
				}
				test.use(places[0], places[1], places[2])
				switch last := (&conn{client: "192.0.2.3"}); kind {
				case 0:
					limit.Enter(last)
				case 1:
					for i, p := range places {
						if !p.Hold(0) {
							t.Errorf("%s: %d is evicted", name, i)
						}
					}
					places[want].Hold(10)
				case 2:
					if freed, reserved := limit.FreeDescriptor(); !freed || reserved != (want < 0) {
						t.Errorf("%s: freed %t, from the reserve %t", name, freed, reserved)
					}
				}
				for i := range conns {
					if conns[i].closed != (i == want) || places[i].Hold(0) == (i == want) {
						t.Errorf("%s, %d: connection %d: closed is %t", name, kind, i, conns[i].closed)
					}
				}
				evicted := 0.0
				if want >= 0 {
					evicted = 1
				}
				if got := testutil.ToFloat64(limit.Metric()); got != evicted {
					t.Errorf("%s, %d: counted %v", name, kind, got)
				}
			})
		}
	}
}

// TestLeave checks that places and memory can be used again.
func TestLeave(t *testing.T) { // R23
	synctest.Test(t, func(t *testing.T) {
		limit := connlimit.New("test", 1, 10)
		defer limit.Close()
		for range 3 {
			c := &conn{client: "192.0.2.1"}
			p := limit.Enter(c)
			if !p.Hold(10) || c.closed {
				t.Error("evicted without need")
			}
			if p.Hold(1) || !c.closed || limit.Held() != 11 {
				t.Errorf("closed %t, %d held", c.closed, limit.Held())
			}
			p.Hold(-11)
			p.Leave()
		}
	})
}

// TestDisplace checks that a client displaces a connection of a client with more connections only.
func TestDisplace(t *testing.T) { // R23, D33
	synctest.Test(t, func(t *testing.T) {
		limit := connlimit.New("test", 10, 0)
		defer limit.Close()
		var conns [5]conn
		var places [5]*connlimit.Place
		for i, client := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.2", "192.0.2.3"} {
			conns[i].client = client
			places[i] = limit.Enter(&conns[i])
			places[i].Serve()
			pass(time.Millisecond)
		}
		if places[1].Displace() || !places[4].Displace() || !conns[1].closed || !places[0].Displace() || !conns[2].closed || places[0].Displace() {
			t.Errorf("%+v", conns)
		}
	})
}

// TestMany checks that of very many connections one of the client with the most makes room.
func TestMany(t *testing.T) { // R23
	limit := connlimit.New("test", 3000, 0)
	defer limit.Close()
	single := &conn{client: "192.0.2.1"}
	limit.Enter(single).Serve()
	for range 6000 {
		limit.Enter(&conn{client: "192.0.2.2"}).Serve()
	}
	if single.closed {
		t.Error("the only connection of a client was closed")
	}
}
