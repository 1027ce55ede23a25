//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package upstream

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// The simulation asks virtual servers in virtual time, with the real Exchange.

// A behaviour tells what a virtual server does with a query at a time since the start:
// it replies with a response code after a delay, or not at all.
type behaviour func(random *rand.Rand, at time.Duration) (delay time.Duration, code int, lost bool)

// rtt is a server whose replies take about base. One in twenty takes much longer,
// since the server has to ask others first.
func rtt(base time.Duration) behaviour {
	return func(random *rand.Rand, _ time.Duration) (time.Duration, int, bool) {
		delay := base + time.Duration(random.ExpFloat64()*float64(base)/4)
		if random.IntN(20) == 0 {
			delay += 20*time.Millisecond + time.Duration(random.IntN(100))*time.Millisecond
		}
		return delay, dns.RcodeSuccess, false
	}
}

// steady is a server whose replies take the same time.
func steady(delay time.Duration) behaviour {
	return func(*rand.Rand, time.Duration) (time.Duration, int, bool) { return delay, dns.RcodeSuccess, false }
}

func deadWhile(b behaviour, dead func(at time.Duration) bool) behaviour {
	return func(random *rand.Rand, at time.Duration) (time.Duration, int, bool) {
		delay, code, lost := b(random, at)
		return delay, code, lost || dead(at)
	}
}

func says(b behaviour, code int) behaviour {
	return func(random *rand.Rand, at time.Duration) (time.Duration, int, bool) {
		delay, _, lost := b(random, at)
		return delay, code, lost
	}
}

// A virtual server is a carrier.
type virtual struct {
	start time.Time

	mu      sync.Mutex
	does    behaviour
	names   func(packet []byte) bool // whether it answers a query; nil means all
	refuses bool                     // its host refuses packets
	random  *rand.Rand
	queries int
}

func (v *virtual) receive() (delay time.Duration, code int, lost bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.queries++
	return v.does(v.random, time.Since(v.start))
}

// asked returns how many queries the server was sent.
func (v *virtual) asked() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.queries
}

func (v *virtual) sweep(time.Time) {}
func (v *virtual) close()          {}

func (v *virtual) send(a *attempt, packet []byte) error {
	delay, code, lost := v.receive()
	if v.refuses {
		time.AfterFunc(time.Millisecond, func() { a.end(nil, syscall.ECONNREFUSED) })
		return nil
	}
	if lost || bytes.Contains(packet, []byte(deadZone)) || v.names != nil && !v.names(packet) {
		time.AfterFunc(a.server.client.latest.Load().Timeout, func() { a.end(nil, ErrTimeout) })
		return nil
	}
	reply := slices.Clone(packet)
	reply[2] |= wire.QR
	reply[3] |= byte(code)
	if code == dns.RcodeSuccess {
		reply[7] = 1 // number of answers
		end, _ := questionEnd(reply)
		reply = slices.Insert(reply, end, []byte("\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\xc0\x00\x02\x01")...)
	}
	time.AfterFunc(delay, func() { a.end(reply, nil) })
	return nil
}

// deadZone is a domain in wire form. No virtual server answers queries for its names, because
// it waits for nameservers that are dead.
const deadZone = "\x04dead\x07example"

var simQuery = binary.BigEndian.AppendUint32(append([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0},
	"\x03www\x07example\x00"...), 1<<16|1)

// simulated returns a client for a test in a bubble, and lets the last replies come when the test ends.
func simulated(t *testing.T, config Config) *Client {
	t.Helper()
	c := NewClient(config)
	t.Cleanup(func() {
		time.Sleep(time.Minute)
		c.Close()
	})
	return c
}

// group returns a group of virtual servers.
func group(c *Client, options Options, does ...behaviour) (*Group, []*virtual) {
	var specs []Spec
	var all []*virtual
	for i, does := range does {
		spec := Spec{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 53)}
		v := &virtual{does: does, random: rand.New(rand.NewPCG(uint64(i), 3)), start: time.Now()}
		c.servers[spec] = c.newServer(spec)
		c.servers[spec].udp, c.servers[spec].stream = v, v
		specs, all = append(specs, spec), append(all, v)
	}
	return c.Group(specs, options), all
}

// F4: by time, a server that is not asked is measured by probes, and asked once it is among the fastest.
func TestFastestIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		const turn = time.Minute
		turns := func(_ *rand.Rand, at time.Duration) (time.Duration, int, bool) {
			if at < turn {
				return 100 * time.Millisecond, dns.RcodeSuccess, false
			}
			return time.Millisecond, dns.RcodeSuccess, false
		}
		g, all := group(c, Options{Fastest: true}, turns, steady(10*time.Millisecond))
		for second := range 180 {
			_, from, err := g.Exchange(t.Context(), simQuery, UDPOnly)
			if want := g.servers[1].name; err != nil || (second > 0 && second < 60 && from != want) || (second > 120 && from == want) {
				t.Errorf("after %d s: answered by %v: %v", second, from, err)
			}
			time.Sleep(time.Second)
		}
		if before := all[0].asked() - 60; before < 0 || before > 65 {
			t.Errorf("the first server got %d packets", all[0].asked())
		}
	})
}

// echoAll gives a client all of its loop probes back.
func echoAll(t *testing.T, c *Client) {
	t.Helper()
	for _, probe := range c.probes {
		name := hex.AppendEncode([]byte{2 * probeLen}, probe.id[:])
		if !c.Echo(wire.Name(name)+loopSuffix(), make([]byte, wire.HeaderLen), netip.AddrPort{}) {
			t.Error("the probe is not recognised")
		}
	}
}

// F6: a server whose queries come back is logged once and used no more, also for a query in flight. The others are
// used. It is used again when it no longer loops.
func TestLoop(t *testing.T) {
	logged := new(testlog.Buffer)
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{Logger: logged.Logger()})
		g, all := group(c, Options{}, steady(time.Millisecond))
		all[0].names = func(packet []byte) bool { return !bytes.Contains(packet, simQuery[wire.HeaderLen:]) }
		var asking sync.WaitGroup
		asking.Go(func() {
			if _, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); !errors.Is(err, ErrLoop) {
				t.Errorf("in flight: %v", err)
			}
		})
		synctest.Wait()
		g.Suspect()
		echoAll(t, c)
		asking.Wait()
		all[0].names = nil
		before := all[0].asked()
		for second := range 20 {
			loops := second <= 10 // then it is probed again
			if _, _, err := g.Exchange(t.Context(), simQuery, UDPOnly); loops != errors.Is(err, ErrLoop) {
				t.Errorf("after %d s: %v", second, err)
			}
			if s := c.Status()[0]; loops && (s.State != Looping || s.Looping != ErrLoop.Error() || !g.Down() || second < 10 && all[0].asked() != before) {
				t.Errorf("after %d s: %+v, asked %d times", second, s, all[0].asked()-before)
			}
			time.Sleep(time.Second)
		}
	})
	if text := logged.String(); strings.Count(text, "level=WARN") != 1 || logged.Count("level=WARN", "no longer used", "192.0.2.0") != 1 || logged.Count("used again") != 1 {
		t.Errorf("log:\n%s", text)
	}
}

// F6: only probes that the client has sent are echoes.
func TestEcho(t *testing.T) {
	c := NewClient(Config{})
	defer c.Close()
	for _, name := range []string{
		"", "\x03www\x07example", "\x12nametap-loop-probe", "\x20" + strings.Repeat("0", 32) + "\x12nametap-loop-probe",
		"\x20" + strings.Repeat("x", 32) + "\x12nametap-loop-probe",
	} {
		if c.Echo(wire.Name(name), make([]byte, wire.HeaderLen), netip.AddrPort{}) {
			t.Errorf("%q is an echo", name)
		}
	}
}

// F6: a server that is suspected all the time is probed at once, and then once a second.
func TestSuspectedAllTheTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := simulated(t, Config{})
		g, all := group(c, Options{}, rtt(time.Millisecond))
		for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(100 * time.Millisecond) {
			g.Suspect()
			if most := int(time.Since(began)/time.Second) + 1; all[0].asked() != most {
				t.Errorf("%d probes in %v, want %d", all[0].asked(), time.Since(began), most)
			}
		}
	})
}

const ms = time.Millisecond

// count is 1 if b is true, otherwise 0.
func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
