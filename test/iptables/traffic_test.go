package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
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

// K2: the switch. Rules are installed and removed while the agent and applications run, and no query is lost, whether it
// is captured or passes through. Each removal waits until no query from before it is in flight.
func TestSwitchUnderTraffic(t *testing.T) {
	t.Parallel()
	const rounds = 3
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.capture(func(c *iptables.Config) { c.Settle = time.Hour })
		tr := l.start()
		for n := range rounds {
			tr.awaitMore(t)
			apply(t, c)
			tr.awaitMore(t)
			end := l.removing(c)
			wait.Until(t, "the rules are unhooked", func() bool { return l.log.Count("no longer captured") == n+1 })
			tr.awaitMore(t)
			end()
		}
		tr.awaitMore(t)
		ways := tr.end()
		t.Logf("%v", ways)
		for way := range ways {
			// Between the restores of the two tables, the agent may get a query twice
			// (AAU) if it sends from the port of an application.
			if way != "AU" && way != "U" && way != "AAU" {
				t.Errorf("replies by their way: %v, want none lost", ways)
				break
			}
		}
		if ways["AU"] < rounds*15 || ways["U"] < rounds*15 || 10*ways["AAU"] > ways["AU"] {
			t.Errorf("replies by their way: %v, want AU and U", ways)
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

// K5: an application and the agent send 1,000 queries from the same port to the same two
// nameservers, and either of them may be the first.
func TestSourcePortCollision(t *testing.T) {
	t.Parallel()
	const queries = 500 // each way
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		netns.Need(t, "conntrack")
		l.agentAs("1337 1337", "same", "shared:"+l.eth0(5454), 15053)
		l.apply()
		l.collide(queries)
		l.sh("conntrack -F 2>/dev/null")
		for _, text := range []string{"2first", "3first"} { // the agent sends first, because it is queried directly
			if reply, err := ask("udp", "-", l.local(15053), text); err != nil || reply != text+"AU" {
				t.Fatalf("reply %q, %v", reply, err)
			}
		}
		l.collide(queries)
	})
}

// K5: a flow that started when only nat had its rules is deleted. Otherwise it would be
// used for the agent's queries from the same port.
func TestBetweenTables(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		netns.Need(t, "conntrack")
		rules, err := iptables.Build(l.config(func(c *iptables.Config) { c.Zone = 0 }))
		if err != nil {
			t.Fatal(err)
		}
		l.ns.Pipe(rules.Text(l.family), l.tool("-restore"), "--noflush", "-w", "5")
		if reply, err := ask("udp", l.eth0(5454), l.server('2'), "2early"); err == nil {
			t.Fatalf("reply %q without an agent", reply)
		}
		if got := l.entries(); !strings.Contains(got, "sport=5454") {
			t.Fatalf("no entry of port 5454:\n%s", got)
		}
		l.agentAs("1337 1337", "same", "shared:"+l.eth0(5454), 15053)
		l.keep(l.apply(quick))
		wait.Until(t, "the flow is forgotten", func() bool { return !strings.Contains(l.entries(), "sport=5454") })
		if reply, err := ask("udp", "-", l.local(15053), "2late"); err != nil || reply != "2lateAU" {
			t.Errorf("reply %q, %v, want %q", reply, err, "2lateAU")
		}
	})
}

// entries lists conntrack's entries of UDP to port 53.
func (l *lab) entries() string {
	l.t.Helper()
	return l.sh("conntrack -L -f %s -p udp --dport 53 2>/dev/null", strings.ToLower(l.family.String()))
}

// collide queries two nameservers from the agent's port.
func (l *lab) collide(queries int) {
	l.t.Helper()
	ways := make(map[string]int)
	for n := range queries {
		digit := byte('2' + n%2)
		text := fmt.Sprintf("%cn%d.", digit, n)
		reply, err := ask("udp", l.eth0(5454), l.server(digit), text)
		ways[strings.TrimPrefix(reply, text)]++
		if err != nil {
			l.t.Fatalf("query %d: %v; replies by their way: %v", n, err, ways)
		}
	}
	if ways["AU"] != queries {
		l.t.Errorf("replies by their way: %v, want %d by AU", ways, queries)
	}
	entries := l.entries()
	if strings.Contains(entries, "UNREPLIED") || !strings.Contains(entries, "sport=5454") {
		l.t.Errorf("conntrack has UNREPLIED entries, or none of port 5454:\n%s", entries)
	}
}
