//nolint:forbidigo // the tests of this file run in synctest bubbles, whose clock Sleep advances
package upstream

import (
	"encoding/hex"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// F10, F15, F6: when a server that is asked over TLS only falls silent with many queries in
// flight, further ones fail at once. A loop probe is sent nevertheless, and its result is used.
// When the server answers again, no query fails.
func TestOverloadEndsOverTLS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := NewClient(Config{})
		defer c.Close()
		const outage = 8 * time.Second
		g, all := group(c, Options{}, deadWhile(rtt(time.Millisecond), func(at time.Duration) bool { return at < outage }))
		g.servers[0].udp = nil
		ask := func() error {
			_, _, err := g.Exchange(t.Context(), simQuery, UDPThenTCP)
			return err
		}
		var asking sync.WaitGroup
		for range 400 {
			asking.Go(func() {
				if err := ask(); !errors.Is(err, ErrLoop) {
					t.Errorf("in flight: %v", err)
				}
			})
		}
		time.Sleep(2 * time.Second) // they end with ErrLoop below
		if err := ask(); !errors.Is(err, ErrSilent) {
			t.Errorf("in overload: %v", err)
		}
		before := all[0].asked()
		g.Suspect()
		if sent := all[0].asked() - before; sent != 1 {
			t.Errorf("%d probes", sent)
		}
		for _, probe := range c.probes {
			name := hex.AppendEncode([]byte{2 * probeLen}, probe.id[:])
			if !c.Echo(wire.Name(name)+loopSuffix(), Arrival{}) {
				t.Error("the probe is not recognised")
			}
		}
		asking.Wait()
		if err := ask(); !errors.Is(err, ErrLoop) {
			t.Errorf("in a loop: %v", err)
		}
		time.Sleep(loopRecheck + outage)
		_ = ask() // starts another probe
		time.Sleep(time.Second)
		for range 10 {
			if err := ask(); err != nil {
				t.Errorf("with the server back: %v", err)
			}
		}
		time.Sleep(time.Minute) // the last replies
	})
}
