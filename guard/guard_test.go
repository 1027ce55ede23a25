package guard_test

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/nametap/nametap/guard"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A running is a guard or a client that runs.
type running struct {
	end  func()
	done chan struct{}
}

// run runs f until end is called or the test ends.
func run(t *testing.T, f func(ctx context.Context)) *running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &running{done: make(chan struct{})}
	r.end = func() {
		cancel()
		wait.For(t, "it ends", r.done)
	}
	go func() {
		defer close(r.done)
		f(ctx)
	}()
	t.Cleanup(r.end)
	return r
}

// start starts a guard, which sends each removal.
func start(t *testing.T, path string, removals chan<- struct{}) *running {
	t.Helper()
	listening := make(chan struct{})
	g := run(t, func(ctx context.Context) {
		if err := guard.Run(ctx, nil, guard.Config{
			Path: path, Patience: guard.Patience, FailOpen: true, Log: testlog.New(t).Logger(),
			Listening: func() { close(listening) },
			Remove: func(context.Context) error {
				removals <- struct{}{}
				return nil
			},
		}); err != nil {
			t.Error(err)
		}
	})
	wait.For(t, "agents can connect", listening)
	return g
}

// TestClient checks that an agent is connected to each of two guards in succession, and that
// rules are removed after its end.
func TestClient(t *testing.T) {
	path, log := filepath.Join(t.TempDir(), "socket"), testlog.New(t)
	removals := make(chan struct{}, 10)
	first := start(t, path, removals)
	c := guard.NewClient(path, log.Logger())
	c.SetFailOpen(true)
	client := run(t, c.Run)
	wait.For(t, "the guard replies", c.Enter(guard.Answering))
	if !c.Held() {
		t.Fatal("the client is not connected")
	}
	first.end()
	wait.Until(t, "the client notices the end", func() bool { return !c.Held() })
	start(t, path, removals)
	wait.Until(t, "the client is connected again", c.Held)
	if log.Count("nametap-guard cannot be reached") != 1 {
		t.Error("the end of the guard is not logged once")
	}
	client.end()
	if len(removals) > 0 {
		t.Error("rules were removed while the agent was connected")
	}
	wait.For(t, "rules are removed", removals)
}

// TestClientWithoutGuard checks that an agent does not wait for a guard that does not run or
// does not accept.
func TestClientWithoutGuard(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	c := guard.NewClient(path, testlog.New(t).Logger())
	run(t, c.Run)
	wait.For(t, "the attempt has failed", c.Enter(guard.Answering))
	if c.Held() {
		t.Error("held without a guard")
	}
	deaf, err := new(net.ListenConfig).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = deaf.Close() })
	wait.For(t, "the attempt has failed", c.Enter(guard.Ending))
}
