package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// agentUser is the uid and gid of the agent. The rules let its queries pass through.
	agentUser = 1337
	agentPort = 15053
	// The paths take turns, captureTurns times in a round, with captureQueries each. Other
	// load on the machine comes in bursts, so many short turns are more precise than a few
	// long ones.
	captureTurns   = 10
	captureQueries = 500
	// settling is the number of queries before a turn that do not count, because agent and
	// thread have slept.
	settling = 50
	// namespacesEnd is the time for the kernel to remove namespaces.
	namespacesEnd = time.Second
)

// A path is a way of a client's queries to the agent.
type path struct {
	what string
	// backend is the backend of the rules. If it is empty, there are no rules and the
	// client queries the agent directly.
	backend string
	zone    string
}

// paths are the compared paths, the direct one first.
func paths() []path {
	return []path{
		{what: "direct, no rules"},
		{what: "nft", backend: "nft", zone: "53"},
		{what: "nft, no zone", backend: "nft", zone: "0"},
		{what: "legacy", backend: "legacy", zone: "53"},
		{what: "legacy, no zone", backend: "legacy", zone: "0"},
	}
}

// target returns the address that the client queries: the agent's, or one without a
// nameserver, so that only redirected queries get an answer.
func (p path) target() netip.AddrPort {
	if p.backend == "" {
		return netip.AddrPortFrom(address(127, 1), agentPort)
	}
	return port53(firstServer())
}

// A captureBench measures the cost of capture.
type captureBench struct {
	*experiments

	binary string
	paths  []path
	// found are figures by path and manner, installed those by backend.
	found     map[path]map[manner]figures
	installed map[string]figures
}

// captureCosts compares redirected queries with direct ones, and measures the time to
// install the rules. Each round uses new namespaces, because rules leave traces in a
// namespace, and its table of connections fills.
func (e *experiments) captureCosts(ctx context.Context) error {
	b := &captureBench{experiments: e, found: map[path]map[manner]figures{}, installed: map[string]figures{}}
	if err := b.prepare(ctx); err != nil {
		return err
	}
	for round := range b.rounds {
		fmt.Fprintf(b.progress, "capture, round %d of %d\n", round+1, b.rounds)
		if err := b.round(ctx, round); err != nil {
			return err
		}
		// The namespaces of a round end with it, and so do the connections in them.
		if err := sleep(ctx, namespacesEnd); err != nil {
			return err
		}
		if err := b.installs(ctx, round); err != nil {
			return err
		}
	}
	for _, m := range manners() {
		e.results.Tables = append(e.results.Tables, b.table(m))
	}
	e.results.Tables = append(e.results.Tables, b.installTable())
	return nil
}

// prepare finds the binary and leaves out missing backends.
func (b *captureBench) prepare(ctx context.Context) error {
	how, err := b.lab.agent(ctx, netip.AddrPort{}, netip.AddrPort{})
	if err != nil {
		return err
	}
	b.binary = how.argv[0]
	// The agent's user must be able to enter these directories on the way to the binary.
	for _, dir := range []string{b.lab.dir, b.lab.binaries} {
		if err := os.Chmod(dir, 0o711); err != nil {
			return fmt.Errorf("letting the agent into a directory: %w", err)
		}
	}
	if err := b.lab.useNameservers(firstServer()); err != nil {
		return err
	}
	missing := map[string]error{}
	for _, p := range paths() {
		if p.backend == "" {
			continue
		}
		if _, ok := missing[p.backend]; !ok {
			missing[p.backend] = inNetspace(func() error { _, err := b.apply(ctx, p); return err })
			if err := missing[p.backend]; err != nil {
				b.results.note("LEFT OUT: %s: %v; on Debian: apt-get install iptables", p.backend, err)
			}
		}
	}
	b.paths = slices.DeleteFunc(paths(), func(p path) bool { return missing[p.backend] != nil })
	for _, p := range b.paths {
		b.found[p] = map[manner]figures{}
		for _, m := range manners() {
			b.found[p][m] = figures{}
		}
	}
	return ctx.Err()
}

// A captured is an agent in a namespace, with a resolver that queries it on one path.
type captured struct {
	path

	space    *netspace
	control  *control
	agent    *process
	resolver *resolver
}

// round measures all paths side by side.
func (b *captureBench) round(ctx context.Context, round int) error {
	var all []*captured
	defer func() {
		for _, c := range all {
			b.end(c)
		}
	}()
	for _, p := range b.paths {
		c := &captured{path: p}
		all = append(all, c)
		if err := b.begin(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", p.what, err)
		}
	}
	for _, m := range manners() {
		for turn := range captureTurns {
			for i := range all {
				c := all[(i+round+turn)%len(all)]
				a, err := c.turn(m)
				if err != nil {
					return fmt.Errorf("%s: %w", c.what, err)
				}
				a.enter(b.found[c.path][m], round*captureTurns+turn)
			}
			if err := ctx.Err(); err != nil {
				return err
			}
		}
		for _, c := range all {
			c.resolver.close()
		}
	}
	return nil
}

// begin starts the agent, and installs the rules of its path.
func (b *captureBench) begin(ctx context.Context, c *captured) (err error) {
	if c.resolver, err = newResolver(c.target(), mixes()[0], b.lab.services); err != nil {
		return err
	}
	if c.space, err = newNetspace(); err != nil {
		return err
	}
	return c.space.do(func() error {
		if c.control, err = b.lab.startControl(ctx); err != nil {
			return err
		}
		if err := c.control.send(b.lab.path("table.pb")); err != nil {
			return err
		}
		addr := netip.AddrPortFrom(address(127, 1), agentPort)
		// The agent's user can read the system's file, but no file of the lab.
		how, err := b.lab.agent(ctx, addr, c.control.addr, "--resolv-conf", "/etc/resolv.conf")
		if err != nil {
			return err
		}
		c.agent, err = b.lab.start(ctx, command{name: agentName, argv: how.argv, user: agentUser})
		if err != nil {
			return err
		}
		direct, asks := mixes()[0], checker{network: "udp", addr: addr}
		err = c.agent.await(ctx, startLimit, func(ctx context.Context) error { return asks.ask(ctx, direct, b.lab.services[0]) })
		if err != nil {
			return err
		}
		if _, err := b.apply(ctx, c.path); err != nil {
			return err
		}
		for _, network := range []string{"udp", "tcp"} {
			asks := checker{network: network, addr: c.target()}
			if err := asks.check(ctx, direct, b.lab.services); err != nil {
				return err
			}
		}
		return nil
	})
}

// end stops what begin has started.
func (b *captureBench) end(c *captured) {
	if c.resolver != nil {
		c.resolver.close()
	}
	if c.agent != nil {
		b.lab.stop(c.agent)
	}
	if c.control != nil {
		b.lab.stop(c.control.process)
	}
	if c.space != nil {
		c.space.close()
	}
}

// An asked is the cost of some queries.
type asked struct {
	took          []time.Duration
	agent, client time.Duration
}

// turn sends some queries and returns their cost.
func (c *captured) turn(m manner) (a asked, err error) {
	err = c.space.do(func() error {
		for range settling {
			if _, err := c.resolver.ask(m); err != nil {
				return err
			}
		}
		before, err := c.clocks()
		if err != nil {
			return err
		}
		for range captureQueries {
			took, err := c.resolver.ask(m)
			if err != nil {
				return err
			}
			a.took = append(a.took, took)
		}
		after, err := c.clocks()
		a.agent, a.client = after[0]-before[0], after[1]-before[1]
		return err
	})
	return a, err
}

// clocks returns the processor times of the agent and of the calling thread. It does not
// look for children of the agent: there are none, and the search would take longer than the
// queries.
func (c *captured) clocks() ([2]time.Duration, error) {
	agent, err := processorClock(clockOf(c.agent.pid))
	client, err2 := processorClock(unix.CLOCK_THREAD_CPUTIME_ID)
	return [2]time.Duration{agent, client}, errors.Join(err, err2)
}

// Names of the figures of queries.
const (
	captureAgent = "agent_us_per_query"
	captureBoth  = "agent_and_client_us_per_query"
)

// captureFigures are the figures of queries, with the headers of their columns.
func captureFigures() [][2]string {
	return [][2]string{
		{captureAgent, "agent µs"}, {captureBoth, "agent and client µs"}, {latencyP50, "p50 µs"}, {latencyP99, "p99 µs"},
	}
}

// enter stores the figures of a turn.
func (a asked) enter(f figures, turn int) {
	slices.Sort(a.took)
	n := float64(len(a.took))
	f.set(captureAgent, turn, microseconds(a.agent)/n)
	f.set(captureBoth, turn, microseconds(a.agent+a.client)/n)
	f.set(latencyP50, turn, microseconds(quantile(a.took, 0.50)))
	f.set(latencyP99, turn, microseconds(quantile(a.took, 0.99)))
}

// table compares the paths.
func (b *captureBench) table(m manner) table {
	t := table{
		title:  fmt.Sprintf("A mesh name, %s: medians of %d turns of %d queries", m.what, b.rounds*captureTurns, captureQueries),
		header: []string{"path"},
	}
	for _, f := range captureFigures() {
		t.header = append(t.header, f[1], "× direct")
	}
	direct := b.found[b.paths[0]][m]
	for _, p := range b.paths {
		row := []string{p.what}
		for _, f := range captureFigures() {
			got := b.found[p][m][f[0]]
			row = append(row, cell(got.median()), cell(got.over(direct[f[0]]).median()))
		}
		t.rows = append(t.rows, row)
	}
	return t
}
