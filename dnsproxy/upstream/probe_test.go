package upstream_test

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// F6: a probe that comes back with its own ID does not mean that the server loops, whatever its source port is now. The
// socket is used no more.
func TestRedirectedProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // time stands still
		var logged testlog.Buffer
		probed := make(chan string, 10) // where probes came from
		var c *upstream.Client
		var s *raw
		made := make(chan struct{}) // closed when c and s are set
		s = serve(t, func(query []byte, _ string) [][]byte {
			if !bytes.Contains(query, []byte("\x12nametap-loop-probe\x00")) {
				return [][]byte{reply(query, 3)}
			}
			<-made
			s.mu.Lock()
			from := s.from[len(s.from)-1]
			s.mu.Unlock()
			name := wire.Name(query[12 : len(query)-5])
			if c.Echo(name, query, netip.MustParseAddrPort("192.0.2.53:53")) {
				t.Error("a probe on its way to another nameserver counts as one that has come back")
			}
			if !c.Echo(name, query, netip.AddrPort{}) {
				t.Errorf("the probe is not recognised: %q", query)
			}
			probed <- from
			return [][]byte{reply(query, 5)}
		})
		c = client(t, upstream.Config{Logger: logged.Logger()})
		close(made)
		g := c.Group(specs(s), upstream.Options{})
		g.Suspect()
		from := <-probed
		const queries = 40 // more than the number of sockets, of which each query takes one at random
		for range queries {
			ask(t, g, 0)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.from) != 1+queries || slices.Contains(s.from[1:], from) {
			t.Errorf("%d queries came from %v", len(s.from), s.from)
		}
		if st := c.Status()[0]; st.State != upstream.Up || st.LastError != "" || logged.String() != "" {
			t.Errorf("%+v, log:\n%s", st, &logged)
		}
	})
}
