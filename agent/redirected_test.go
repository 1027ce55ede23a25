package agent_test

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/agent"
)

// TestOnlyNameserverOf checks which resolv.conf leads to the agent alone.
func TestOnlyNameserverOf(t *testing.T) { // I11
	t.Parallel()
	listeners := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:53")}
	for _, test := range []struct {
		text      string
		listeners []netip.AddrPort
		want      bool
	}{
		{"nameserver 127.0.0.1\nsearch shop.svc.cluster.local\n", listeners, true},
		{"nameserver 127.0.0.1\nnameserver 127.0.0.1\n", listeners, true},
		{"nameserver 127.0.0.1\nnameserver 10.96.0.10\n", listeners, false},
		{"nameserver 10.96.0.10\n", listeners, false},
		{"nameserver 127.0.0.53\n", listeners, false},
		{"nameserver 127.0.0.1\n", []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:15053")}, false},
		{"nameserver 127.0.0.1\n", []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:53")}, true},
		{"nameserver ::1\n", listeners, false},
		{"search shop.svc.cluster.local\n", listeners, false},
	} {
		path := filepath.Join(t.TempDir(), "resolv.conf")
		if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
			t.Fatal(err)
		}
		want := ""
		if test.want {
			want = path
		}
		if got := agent.OnlyNameserverOf(path, test.listeners); got != want {
			t.Errorf("%q with %v: %q, want %q", test.text, test.listeners, got, want)
		}
	}
	if got := agent.OnlyNameserverOf(filepath.Join(t.TempDir(), "absent"), listeners); got != "" {
		t.Errorf("without a file: %q", got)
	}
}
