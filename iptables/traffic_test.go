package iptables_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/iptables"
)

// traffic is a set of applications that send queries continuously, and the results.
type traffic struct {
	mu   sync.Mutex
	ways map[string]int // numbers of replies by their path; "lost" counts queries without a reply
	stop context.CancelFunc
	done sync.WaitGroup
}

// start starts applications: with one socket for all queries, with a new socket for each
// query, and over TCP.
func (l *lab) start() *traffic {
	l.t.Helper()
	ctx, cancel := context.WithCancel(l.t.Context())
	tr := &traffic{ways: make(map[string]int), stop: cancel}
	for range 2 {
		conn := l.socket()
		l.loop(ctx, tr, func(text string) (string, error) { return askOn(conn, text) })
	}
	for _, network := range []string{"udp", "tcp"} {
		l.loop(ctx, tr, func(text string) (string, error) {
			time.Sleep(time.Millisecond) //nolint:forbidigo // slower, so that TCP does not run out of ports
			return ask(network, "-", l.server('2'), text)
		})
	}
	l.t.Cleanup(func() { tr.end() })
	return tr
}

func (l *lab) loop(ctx context.Context, tr *traffic, ask func(string) (string, error)) {
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

// awaitMore waits for the results of 50 more queries.
func (tr *traffic) awaitMore(t *testing.T) {
	t.Helper()
	count := func() int {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		n := 0
		for _, c := range tr.ways {
			n += c
		}
		return n
	}
	target := count() + 50
	wait.Until(t, "queries go on", func() bool { return count() >= target })
}

// K2: other settings, and rules that are written again, while applications send queries.
func TestReplaceUnderTraffic(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply()
		tr := l.start()
		for n := range 10 {
			tr.awaitMore(t)
			cfg := l.config(func(c *iptables.Config) { c.ExcludeUIDs = []uint32{uint32(5000 + n)} })
			replace(t, c, cfg)
		}
		tr.awaitMore(t)
		ways := tr.end()
		t.Logf("%v", ways)
		if len(ways) != 1 || ways["AU"] < 500 {
			t.Errorf("replies by their way: %v, want all by AU", ways)
		}
	})
}

// The switch: rules are installed and removed while the agent and applications run, and no
// query is lost, whether it is captured or passes through.
func TestSwitchUnderTraffic(t *testing.T) {
	t.Parallel()
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		// An agent is faster, but this machine may be slow.
		c := l.capture(func(c *iptables.Config) { c.Settle = time.Second })
		tr := l.start()
		for range rounds {
			tr.awaitMore(t)
			apply(t, c)
			tr.awaitMore(t)
			remove(t, c)
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
		if ways["AU"] < 100 || ways["U"] < 100 || ways["AAU"] > 10 {
			t.Errorf("replies by their way: %v, want AU and U", ways)
		}
	})
}

// A query that is in flight when rules are removed gets its reply.
func TestRemoveInFlight(t *testing.T) {
	t.Parallel()
	labs(t, diagonal(), func(l *lab) {
		t := l.t
		l.agent()
		c := l.apply(func(c *iptables.Config) { c.Settle = time.Minute })
		conn := l.socket()
		l.wantOn(conn, "AU")
		ctx, cancel := context.WithCancel(t.Context())
		var removing sync.WaitGroup
		l.askHeld(conn)
		removing.Go(func() {
			l.ns.Run(func() {
				if err := c.Remove(ctx); err != nil {
					t.Errorf("remove: %v", err)
				}
			})
		})
		wait.Until(t, "the rules are unhooked", func() bool { return l.log.Count("no longer captured") == 1 })
		l.wantHeld(conn, "AU")
		cancel() // which only ends the wait
		removing.Wait()
		if got := l.holders(); got != "" {
			t.Errorf("after remove: %s", got)
		}
		l.wantOn(conn, "U")
	})
}

// K5: an application and the agent send 2,000 queries from the same port to the same two
// nameservers, and either of them may be the first.
func TestSourcePortCollision(t *testing.T) {
	t.Parallel()
	const queries = 1_000 // each way
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
		l.ns.Pipe(rules.Text(l.family), l.pick("iptables-", "ip6tables-")+string(l.backend)+"-restore", "--noflush", "-w", "5")
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

// One apply takes less time than a program per rule.
func TestApplyTime(t *testing.T) {
	t.Parallel()
	backends(t, func(l *lab) {
		t, backend := l.t, l.backend
		rules, err := iptables.Build(iptables.DefaultConfig())
		if err != nil {
			t.Fatal(err)
		}
		text := rules.Text(family.IPv4)
		timed := func(script string, args ...any) time.Duration {
			start := time.Now()
			l.sh(script, args...)
			return time.Since(start)
		}
		timed("iptables-%s-restore --noflush -w 5 <<'.'\n%s.", backend, text)
		once := time.Hour // the fastest of several attempts, because the machine may be loaded
		for range 5 {
			once = min(once, timed("iptables-%s-restore --noflush -w 5 <<'.'\n%s.", backend, text))
		}
		var script strings.Builder
		table, programs := "", 0
		for line := range strings.Lines(text) {
			switch {
			case strings.HasPrefix(line, "*"):
				table = strings.TrimSpace(line[1:])
				fmt.Fprintf(&script, "iptables-%s -t %s -F OUTPUT\n", backend, table)
			case strings.HasPrefix(line, "-"):
				fmt.Fprintf(&script, "iptables-%s -w 5 -t %s %s", backend, table, line)
				programs++
			}
		}
		each := timed("%s", script.String())
		cfg := l.config()
		c := l.with(cfg)
		start := time.Now()
		apply(t, c)
		whole := time.Since(start)
		start = time.Now()
		apply(t, c)
		t.Logf("%s: one restore %v, %d programs %v; Apply of both families, looking at both backends, %v; with nothing to do %v",
			backend, once, programs, each, whole, time.Since(start))
		if once > each {
			t.Errorf("one restore takes %v, %d programs take %v", once, programs, each)
		}
	})
}
