package agent

import (
	"log/slog"
	"path/filepath"
	"slices"
	"testing"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
)

// systemd-resolved is to query the agent for the local-only suffixes in use.
func TestLocalOnlyNames(t *testing.T) { // R10
	t.Parallel()
	cfg := dnsproxy.Config{
		LocalOnly: []string{"corp.example"}, Logger: slog.New(slog.DiscardHandler),
		Forward: forward.Config{ResolvConf: filepath.Join(t.TempDir(), "absent")},
	}
	proxy, err := dnsproxy.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	a := &Agent{core: &core{proxy: proxy}}
	for _, want := range []string{"corp.example", "lab.example"} {
		cfg.LocalOnly = []string{want + "."}
		if err := a.Configure(cfg); err != nil {
			t.Fatal(err)
		}
		if names := domains(proxy); !slices.Equal(names, []string{"cluster.local", want, "local", "svc"}) {
			t.Errorf("the names are %q", names)
		}
	}
}
