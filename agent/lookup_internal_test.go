package agent

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/nametap/nametap/dnsproxy/upstream"
)

// TestControlResolver checks that the control plane is looked up at the agent's nameservers, in
// turn, if resolv.conf names the agent, and at the nameservers of resolv.conf otherwise. It is looked up only once the
// agent's listeners are open, because before, the agent would ask itself, and hold its own query for 2 s.
func TestControlResolver(t *testing.T) { // C6, I11
	t.Parallel()
	at := func(addr string) upstream.Spec { return upstream.Spec{Addr: netip.MustParseAddrPort(addr)} }
	tls := at("127.0.0.9:853")
	tls.TLS = true
	listeners := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}
	for _, test := range []struct {
		server      string
		nameservers []upstream.Spec
		want        []string
	}{
		{"127.0.0.1:53", []upstream.Spec{tls, at("127.0.0.2:53"), at("127.0.0.3:53")}, []string{"127.0.0.2:53", "127.0.0.3:53", "127.0.0.2:53"}},
		{"127.0.0.4:53", []upstream.Spec{at("127.0.0.2:53")}, []string{"127.0.0.4:53"}},
		{"127.0.0.1:53", []upstream.Spec{tls}, []string{"127.0.0.1:53"}},
		{"127.0.0.1:53", nil, []string{"127.0.0.1:53"}},
	} {
		open := make(chan struct{})
		r := controlResolver(open, func() []upstream.Spec { return slices.Clone(test.nameservers) }, func() []netip.AddrPort { return listeners })
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := r.Dial(ended, "udp", test.server); !errors.Is(err, context.Canceled) {
			t.Errorf("before the listeners are open: %v", err)
		}
		close(open)
		for _, want := range test.want {
			conn, err := r.Dial(t.Context(), "udp", test.server) // sends nothing
			if err != nil {
				t.Fatal(err)
			}
			if got := conn.RemoteAddr().String(); got != want || !r.PreferGo {
				t.Errorf("%s with %v: asks %s, want %s", test.server, test.nameservers, got, want)
			}
			conn.Close()
		}
	}
}
