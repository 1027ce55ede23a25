package forward_test

import (
	"log/slog"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// newForwarder returns a forwarder without resolv.conf that does not run.
func newForwarder(t *testing.T, cfg forward.Config) *forward.Forwarder {
	t.Helper()
	cfg.ResolvConf = filepath.Join(t.TempDir(), "absent")
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	f, err := forward.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// A listener that is opened later makes a nameserver with its address unusable at once.
func TestOwnListenersAreNoNameservers(t *testing.T) { // F6
	t.Parallel()
	log := new(testlog.Buffer)
	addrs := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:15053"), netip.MustParseAddrPort("[::1]:15053")}
	f := newForwarder(t, forward.Config{Logger: log.Logger(), Upstreams: []upstream.Spec{{Addr: addrs[0]}, {Addr: addrs[1]}}})
	for i := range 3 {
		f.SetListeners(addrs[:i])
		if left := f.Upstreams(); len(left) != 2-i || i == 1 && left[0].Addr != addrs[1] {
			t.Errorf("with listeners on %v: %v", addrs[:i], left)
		}
	}
	if !strings.Contains(log.String(), "it listens on [::1]:15053") {
		t.Errorf("logged %s", log)
	}
}

func TestConfigIsChecked(t *testing.T) { // R7
	t.Parallel()
	for want, cfg := range map[string]forward.Config{
		"limit of -1 queries":       {MaxInflight: -1},
		"upstream timeout -1s":      {Timeout: -1e9},
		`upstream-order "random"`:   {Order: "random"},
		`route for "a.example"`:     {Routes: []forward.Route{{Suffix: "a.example"}}},
		`upstream for "a..example"`: {Routes: []forward.Route{{Suffix: "a..example", Servers: []upstream.Spec{{}}}}},
	} {
		if _, err := forward.New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", cfg, err, want)
		}
	}
}
