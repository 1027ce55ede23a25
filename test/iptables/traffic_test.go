package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// traffic is a set of applications that send queries continuously, and the results.
type traffic struct {
	mu    sync.Mutex
	ways  map[string]int // numbers of replies by their path; "lost" counts queries without a reply
	asked [4]int         // the queries of each application
	stop  context.CancelFunc
	done  sync.WaitGroup
}

// start starts applications: with one socket for all queries, with a new socket for each
// query, and over TCP.
func (l *lab) start() *traffic {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	tr := &traffic{ways: make(map[string]int), stop: cancel}
	for n := range 2 {
		conn := l.socket()
		l.loop(ctx, tr, n, func(text string) (string, error) { return askOn(conn, text) })
	}
	for n, network := range []string{"udp", "tcp"} {
		l.loop(ctx, tr, 2+n, func(text string) (string, error) {
			time.Sleep(time.Millisecond) //nolint:forbidigo // slower, so that TCP does not run out of ports
			return ask(network, "-", l.server('2'), text)
		})
	}
	l.t.Cleanup(func() { tr.end() })
	return tr
}

func (l *lab) loop(ctx context.Context, tr *traffic, app int, ask func(string) (string, error)) {
	asking := func() {
		for n := 0; ctx.Err() == nil; n++ {
			text := fmt.Sprintf("2n%d.", n)
			reply, err := ask(text)
			way := strings.TrimPrefix(reply, text)
			if err != nil {
				way = "lost: " + err.Error()
			}
			tr.mu.Lock()
			tr.ways[way]++
			tr.asked[app]++
			tr.mu.Unlock()
		}
	}
	tr.done.Go(func() { l.ns.Run(asking) })
}

// end stops the applications and returns the results of their queries.
func (tr *traffic) end() map[string]int {
	tr.stop()
	tr.done.Wait()
	return tr.ways
}

// awaitMore waits until each application has the results of 15 more queries.
func (tr *traffic) awaitMore(t *testing.T) {
	t.Helper()
	asked := func() [4]int {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return tr.asked
	}
	before := asked()
	wait.Until(t, "queries go on", func() bool {
		now := asked()
		for app := range now {
			if now[app] < before[app]+15 {
				return false
			}
		}
		return true
	})
}

// K2: other settings, and rules that are written again, while applications send queries.
func TestReplaceUnderTraffic(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply()
		tr := l.start()
		for n := range 5 {
			tr.awaitMore(t)
			cfg := l.config(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{uint32(5000 + n)} })
			replace(t, c, cfg)
		}
		tr.awaitMore(t)
		ways := tr.end()
		t.Logf("%v", ways)
		if len(ways) != 1 || ways["AU"] < 5*4*15 {
			t.Errorf("replies by their way: %v, want all by AU", ways)
		}
	})
}

// K9: a query that is in flight when rules are removed gets its reply.
func TestRemoveInFlight(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(func(c *iptables.Config) { c.Settle = time.Minute })
		conn := l.socket()
		l.wantOn(conn, "AU")
		l.askHeld(conn)
		end := l.removing(c)
		wait.Until(t, "the rules are unhooked", func() bool { return l.log.Count("no longer captured") == 1 })
		l.wantHeld(conn, "AU")
		end()
		if got := l.holders(); got != "" {
			t.Errorf("after remove: %s", got)
		}
		l.wantOn(conn, "U")
	})
}
