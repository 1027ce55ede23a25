package forward

import (
	"log/slog"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// F6, V5: systemd-resolved's stub is not asked for names that systemd-resolved would send back,
// whether it is the only nameserver or one of several.
func TestReturned(t *testing.T) {
	t.Parallel()
	stub := upstream.Spec{Addr: netip.MustParseAddrPort("127.0.0.53:53")}
	other := upstream.Spec{Addr: netip.MustParseAddrPort("192.0.2.1:53")}
	for name, servers := range map[string][]upstream.Spec{"only": {stub}, "first": {stub, other}, "none": {other}} {
		f, err := New(Config{
			Upstreams: servers, Routes: []Route{{Suffix: "corp.example", Servers: servers}},
			ResolvConf: filepath.Join(t.TempDir(), "absent"), Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		check := func(host string, returned bool) {
			t.Helper()
			r := f.routing.Load()
			route := r.fallback
			if host == "www.corp.example" {
				route = r.routes[0]
			}
			want := route.group
			if returned && name != "none" {
				want = route.others
			}
			parsed, err := wire.ParseHostname(host)
			if err != nil {
				t.Fatal(err)
			}
			if got := r.group(parsed); got != want {
				t.Errorf("%s: %s has other nameservers than expected, with %v sent back: %v", name, host, r.resolvedDomains, returned)
			}
		}
		check("x.cluster.local", false)
		f.SetReturned([]string{"local", "svc", "www.corp.example"})
		f.SetListeners(nil) // makes the routing again
		check("x.cluster.local", true)
		check("www.corp.example", true)
		check("www.example.org", false)
		f.SetReturned(nil)
		check("x.cluster.local", false)
	}
}
