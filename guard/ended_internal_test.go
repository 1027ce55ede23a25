package guard

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/internal/testkit/testlog"
)

// TestAgentEndsBeforeGuard ends a guard that has not read the end of an agent yet: systemd stops
// both, or the guard was suspended. The rules are removed. An agent that still runs keeps them.
func TestAgentEndsBeforeGuard(t *testing.T) { // V4
	t.Parallel()
	for name, test := range map[string]struct {
		ended bool
		want  int
	}{"ended": {true, 1}, "running": {false, 0}} {
		t.Run(name, func(t *testing.T) {
			listener, err := listen(t.Context(), filepath.Join(t.TempDir(), "socket"))
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			peer, err := new(net.Dialer).DialContext(t.Context(), "unix", listener.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			conn, err := listener.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			removals := 0
			s := &server{agents: map[net.Conn]*agent{conn: {phase: Answering}}, Config: Config{
				FailOpen: true, Patience: Patience, Log: testlog.New(t).Logger(),
				Remove: func(context.Context) error {
					removals++
					return nil
				},
			}}
			if test.ended {
				if err := peer.Close(); err != nil {
					t.Fatal(err)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := s.loop(ctx, make(chan event)); err != nil || removals != test.want {
				t.Errorf("%d removals, %v, want %d", removals, err, test.want)
			}
		})
	}
}
