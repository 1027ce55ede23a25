package agent

import (
	"context"
	"log/slog"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// G13: the records of the guard are saved at the end, and the next agent goes on with them.
func TestGuardRecords(t *testing.T) {
	t.Parallel()
	name, err := wire.ParseHostname("api.example.com")
	if err != nil {
		t.Fatal(err)
	}
	c := &core{log: slog.New(slog.DiscardHandler), clock: clock.New()}
	c.config.XDS.StateDir = t.TempDir()
	for want := uint64(1); want <= 2; want++ {
		c.config.Guard = guard.New("key")
		c.config.Guard.Asked(name, dns.TypeA, nil, -1)
		ended, end := context.WithCancel(t.Context())
		end()
		if err := keepGuardRecords(ended, c, func() {}); err != nil {
			t.Fatal(err)
		}
		if got := c.config.Guard.Records().Names; len(got) != 1 || got[0].Asked != want {
			t.Errorf("%+v, want %d questions", got, want)
		}
	}
}
