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
	// agentUser is the uid and gid of the agent, which the rules tell from the client's.
	agentUser = 1337
	agentPort = 15053
	// The paths take turns, captureTurns times in a round, with captureQueries each. What
	// else the machine does comes in bursts, so many short turns show more than a few
	// long ones.
	captureTurns   = 10
	captureQueries = 500
	// settling are queries before a turn that do not count: agent and thread have slept.
	settling = 50
	// namespacesEnd is what the kernel is given to tidy up.
	namespacesEnd = time.Second
)

// A path is how a client's queries come to the agent.
type path struct {
	what string
	// backend is where the rules are; "" is no rules, and the agent is asked directly.
	backend string
	zone    string
}

// paths are those that are compared, the direct one first.
func paths() []path {
	return []path{
		{what: "direct, no rules"},
		{what: "nft", backend: "nft", zone: "53"},
		{what: "nft, no zone", backend: "nft", zone: "0"},
		{what: "legacy", backend: "legacy", zone: "53"},
		{what: "legacy, no zone", backend: "legacy", zone: "0"},
	}
}

// target is whom the client asks: the agent, or a nameserver that is nowhere, so that
// nothing but the redirection can bring an answer.
func (p path) target() netip.AddrPort {
	if p.backend == "" {
		return netip.AddrPortFrom(address(127, 1), agentPort)
	}
	return port53(firstServer())
}

// A captureBench measures what capture costs.
type captureBench struct {
	*experiments

	binary string
	paths  []path
	// found are figures by path and manner, installed those by backend.
	found     map[path]map[manner]figures
	installed map[string]figures
}

// captureCosts measures queries that are redirected beside those to the agent itself,
// then how long it takes to put the rules in. All is done anew in each round: a
// namespace in which rules have been is not what it was before, and its table of
// connections fills.
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
		// The namespaces of a round end when it is over, with all connections in them.
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

// prepare finds the binary and leaves out the backends that cannot be had.
func (b *captureBench) prepare(ctx context.Context) error {
	how, err := b.lab.agent(ctx, netip.AddrPort{}, netip.AddrPort{})
	if err != nil {
		return err
	}
	b.binary = how.argv[0]
	// The agent's user must come by these to the binary.
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

// A captured is an agent in a namespace, with a resolver that asks it on one path.
type captured struct {
	path

	space    *netspace
	control  *control
	agent    *process
	resolver *resolver
}

// round measures all paths, which live side by side.
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

// begin starts the agent, and puts the rules in if there are any.
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
		// It may read the system's file, but none of the lab's.
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

// An asked is what some queries needed.
type asked struct {
	took          []time.Duration
	agent, client time.Duration
}

// turn asks some queries and says what they needed.
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

// clocks are the processor times of the agent and of the calling thread. Looking for
// the agent's children, which it has not, would take longer than the queries.
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

// captureFigures are all of them, with the heads of their columns.
func captureFigures() [][2]string {
	return [][2]string{
		{captureAgent, "agent µs"}, {captureBoth, "agent and client µs"}, {latencyP50, "p50 µs"}, {latencyP99, "p99 µs"},
	}
}

// enter notes the figures of a turn.
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
