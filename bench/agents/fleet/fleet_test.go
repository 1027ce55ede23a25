package fleet_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"

	"github.com/nametap/nametap/bench/agents/fleet"
	"github.com/nametap/nametap/bench/agents/wire"
)

// someHosts returns n hosts.
func someHosts(n int) map[string]string {
	all := map[string]string{}
	for i := range n {
		all[fmt.Sprintf("h%d.shop", i)] = "10.0.0.1"
	}
	return all
}

// startFleet connects agents to c.
func startFleet(t *testing.T, c *control, cfg fleet.Config) *fleet.Fleet {
	t.Helper()
	cfg.Servers, cfg.Namespaces = []string{c.addr}, []string{"shop", "back"}
	f := fleet.New(cfg)
	t.Cleanup(f.Stop)
	if err := f.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	return f
}

// awaitSum waits until n agents have the table of c.
func awaitSum(t *testing.T, f *fleet.Fleet, c *control, n int) {
	t.Helper()
	wait.Until(t, fmt.Sprintf("%d agents have the table of the control plane", n), func() bool { return f.Sums()[c.sum()] >= n })
}

// All agents follow changes of hosts, in both variants, and need only a few bytes to connect again.
func TestHosts(t *testing.T) {
	t.Parallel()
	const agents = 20
	for name, variant := range map[string]wire.Variant{"delta": wire.Incremental, "sotw": wire.StateOfTheWorld} {
		t.Run(name, func(t *testing.T) {
			c := startControl(t, someHosts(1000))
			edited := time.Now()
			f := startFleet(t, c, fleet.Config{
				Agents: agents, Full: 3, Mode: fleet.Hosts, Variant: variant, Estimate: true,
				Edited: func(host string) (time.Time, bool) { return edited, host == "h1.shop" },
			})
			awaitSum(t, f, c, agents)
			if digests := c.nodes()[agents-1].GetMetadata().GetFields()["NAMETAP_HOSTS"].GetStringValue(); len(digests) != 2732 {
				t.Errorf("an agent that begins with the table of the first one sends %d characters of digests", len(digests))
			}

			r := f.Begin(agents)
			begun := time.Now()
			c.set(map[string]string{"h1.shop": "10.0.0.2", "new.shop": "10.0.0.3", "h2.shop": ""})
			if err := r.Wait(t.Context(), wait.Limit); err != nil {
				t.Fatal(err)
			}
			if times := r.Times(begun); len(times) != agents || times.Quantile(1) <= 0 {
				t.Errorf("the times of the round are %v", times)
			}
			awaitSum(t, f, c, agents)
			if delays := f.Delays(); len(delays) != 3 {
				t.Errorf("delays of h1.shop at the full agents: %v, want 3", delays)
			}

			counts := f.Counts()
			f.Hold()
			f.Disconnect()
			wait.Until(t, "no agent is connected", func() bool { return f.Census().Connected == 0 })
			c.set(map[string]string{"h3.shop": "10.0.0.4"})
			f.Release()
			awaitSum(t, f, c, agents)
			wait.Until(t, "all are connected again", func() bool { return f.Census().Connected == agents })
			after := f.Counts().Since(counts)
			if each := after.Read / agents; each > 1000 || after.Streams != agents || after.Failures != 0 || after.Rejected != 0 {
				t.Errorf("to connect again: %+v, %d bytes each", after, each)
			}
			if n := len(f.Outages()); n != 2*agents {
				t.Errorf("%d outages, want one of each agent at the start and one later", n)
			}
		})
	}
}

// A change that is wrong is noticed by a full agent, which rejects it and connects again to get what is
// right.
func TestWrongChange(t *testing.T) {
	t.Parallel()
	c := startControl(t, someHosts(100))
	f := startFleet(t, c, fleet.Config{Agents: 5, Full: 2, Mode: fleet.Hosts})
	c.mu.Lock()
	c.corrupt = "agent-00001"
	c.mu.Unlock()
	c.set(map[string]string{"h1.shop": "10.0.0.2"})
	wait.Until(t, "the wrong change is rejected", func() bool { return f.Counts().Rejected == 1 })
	awaitSum(t, f, c, 5)
	wait.Until(t, "the control plane has the reason", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.reasons) > 0
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.reasons) != 1 || !strings.Contains(c.reasons[0], "checksum") {
		t.Errorf("the reasons of NACKs are %q", c.reasons)
	}
}

// Agents that are paused do not read, and get the latest state later.
func TestPause(t *testing.T) {
	t.Parallel()
	const agents, paused = 10, 4
	c := startControl(t, someHosts(100))
	f := startFleet(t, c, fleet.Config{Agents: agents, Full: 2, Mode: fleet.Hosts})
	f.Pause(paused)
	c.set(map[string]string{"h1.shop": "10.0.0.2"})
	awaitSum(t, f, c, agents)
	r := f.Begin(agents - paused)
	for i := range 5 {
		c.set(map[string]string{"h2.shop": fmt.Sprintf("10.0.1.%d", i)})
	}
	if err := r.Wait(t.Context(), wait.Limit); err != nil {
		t.Fatal(err)
	}
	awaitSum(t, f, c, agents-paused)
	if n := f.Sums()[c.sum()]; n != agents-paused {
		t.Errorf("%d agents have the latest table, want %d", n, agents-paused)
	}
	f.Resume()
	awaitSum(t, f, c, agents)
}

// Agents that do not merge hosts keep whole tables, if they are full.
func TestPlain(t *testing.T) {
	t.Parallel()
	for name, variant := range map[string]wire.Variant{"delta": wire.Incremental, "sotw": wire.StateOfTheWorld} {
		t.Run(name, func(t *testing.T) {
			c := startControl(t, someHosts(2000))
			f := startFleet(t, c, fleet.Config{Agents: 6, Full: 3, Mode: fleet.Plain, Variant: variant})
			awaitSum(t, f, c, 3)
			c.set(map[string]string{"h1.shop": "", "new.shop": "10.0.0.3"})
			awaitSum(t, f, c, 3)
			if sums := f.Sums(); len(sums) != 1 || sums[c.sum()] != 3 {
				t.Errorf("%v, want a checksum of the full agents only", sums)
			}
		})
	}
}

// A control plane that does not know changes is an error at the start.
func TestNoChanges(t *testing.T) {
	t.Parallel()
	c := startControl(t, someHosts(1))
	c.old = true
	f := fleet.New(fleet.Config{Agents: 2, Mode: fleet.Hosts, Servers: []string{c.addr}, Namespaces: []string{"shop"}})
	defer f.Stop()
	if err := f.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "does not know the mode") {
		t.Errorf("%v, want an error that names the mode", err)
	}
}
