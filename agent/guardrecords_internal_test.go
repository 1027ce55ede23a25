package agent

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// G13: the records of the guard are saved at the end, and the next agent goes on with them. The log says if they cannot be.
func TestGuardRecords(t *testing.T) {
	t.Parallel()
	name, err := wire.ParseHostname("api.example.com")
	if err != nil {
		t.Fatal(err)
	}
	var log strings.Builder
	c := &core{log: slog.New(slog.NewTextHandler(&log, nil)), clock: clock.New()}
	c.config.XDS.StateDir = t.TempDir()
	ended, end := context.WithCancel(t.Context())
	end()
	for want := uint64(1); want <= 2; want++ {
		c.config.Guard = guard.New("key")
		c.config.Guard.Asked(name, dns.TypeA, nil, -1)
		if err := keepGuardRecords(ended, c, func() {}); err != nil {
			t.Fatal(err)
		}
		if got := c.config.Guard.Records().Names; len(got) != 1 || got[0].Asked != want {
			t.Errorf("%+v, want %d questions", got, want)
		}
		if log.Len() > 0 {
			t.Errorf("a warning: %s", &log)
		}
	}
	c.config.XDS.StateDir += "/" + guard.RecordsFile // no directory
	if err := keepGuardRecords(ended, c, func() {}); err != nil || !strings.Contains(log.String(), "--state-dir") {
		t.Errorf("%v, and the log %q", err, &log)
	}
}
