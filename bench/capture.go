package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/nametap/nametap/bench/lab"

	"github.com/nametap/nametap/bench/report"

	"golang.org/x/sys/unix"
)

const (
	// agentUser is the uid and gid of the agent. The rules let its queries pass through.
	agentUser = 1337
	agentPort = 15053
	// The paths take turns. In a round, each path has captureTurns turns of captureQueries queries. Other load on the
	// machine comes in bursts, so many short turns are more precise than a few long ones.
	captureTurns   = 10
	captureQueries = 500
	// settling is the number of queries before a turn that do not count, because the agent and the client's thread have
	// slept before them.
	settling = 50
)

// A path is a way of a client's queries to the agent.
type path struct {
	what string
	// backend is the backend of the rules. If it is empty, there are no rules and the
	// client queries the agent directly.
	backend string
}

// paths are the compared paths, the direct one first.
func paths() []path {
	return []path{
		{what: "direct, no rules"},
		{what: "nft", backend: "nft"},
		{what: "legacy", backend: "legacy"},
	}
}

// target returns the address that the client queries: the agent's address or, with rules,
// an address without a nameserver, where only redirected queries get an answer.
func (p path) target() netip.AddrPort {
	if p.backend == "" {
		return netip.AddrPortFrom(lab.Address(127, 1), agentPort)
	}
	return lab.Port53(lab.FirstServer())
}

// A captureBench measures the cost of capture.
type captureBench struct {
	*experiments

	binary string
	paths  []path
	found  map[path]map[lab.Manner]report.Figures
}

// captureCosts compares redirected queries with direct ones. Each round uses new namespaces, because rules leave traces in a
// namespace, and its table of connections fills.
func (e *experiments) captureCosts(ctx context.Context) error {
	b := &captureBench{experiments: e, found: map[path]map[lab.Manner]report.Figures{}}
	if err := b.prepare(ctx); err != nil {
		return err
	}
	for round := range b.rounds {
		fmt.Fprintf(b.progress, "capture, round %d of %d\n", round+1, b.rounds)
		if err := b.round(ctx, round); err != nil {
			return err
		}
	}
	for _, m := range lab.Manners() {
		e.results.Tables = append(e.results.Tables, b.table(m))
	}
	return nil
}

// prepare finds the binary and leaves out missing backends.
func (b *captureBench) prepare(ctx context.Context) error {
	how, err := b.lab.Agent(ctx, netip.AddrPort{}, netip.AddrPort{})
	if err != nil {
		return err
	}
	b.binary = how.Argv[0]
	// The agent's user must be able to enter these directories on the way to the binary.
	for _, dir := range []string{b.lab.Dir, b.lab.Binaries} {
		if err := os.Chmod(dir, 0o711); err != nil {
			return fmt.Errorf("letting the agent into a directory: %w", err)
		}
	}
	if err := b.lab.UseNameservers(lab.FirstServer()); err != nil {
		return err
	}
	missing := map[string]error{}
	for _, p := range paths() {
		if p.backend == "" {
			continue
		}
		if _, ok := missing[p.backend]; !ok {
			missing[p.backend] = lab.InNetspace(func() error { return b.apply(ctx, p) })
			if err := missing[p.backend]; err != nil {
				b.results.note("LEFT OUT: %s: %v; on Debian: apt-get install iptables", p.backend, err)
			}
		}
	}
	b.paths = slices.DeleteFunc(paths(), func(p path) bool { return missing[p.backend] != nil })
	for _, p := range b.paths {
		b.found[p] = map[lab.Manner]report.Figures{}
		for _, m := range lab.Manners() {
			b.found[p][m] = report.Figures{}
		}
	}
	return ctx.Err()
}

// A captured is an agent in a namespace, with a resolver that queries it on one path.
type captured struct {
	path

	space    *lab.Netspace
	control  *lab.Control
	agent    *lab.Process
	resolver *lab.Resolver
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
	for _, m := range lab.Manners() {
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
			c.resolver.Close()
		}
	}
	return nil
}

// begin starts the agent, and installs the rules of its path.
func (b *captureBench) begin(ctx context.Context, c *captured) (err error) {
	if c.resolver, err = lab.NewResolver(c.target(), lab.Mixes()[0], b.lab.Services); err != nil {
		return err
	}
	if c.space, err = lab.NewNetspace(); err != nil {
		return err
	}
	return c.space.Do(func() error {
		if c.control, err = b.lab.StartControl(ctx); err != nil {
			return err
		}
		if err := c.control.Send(b.lab.Path("table.pb")); err != nil {
			return err
		}
		addr := netip.AddrPortFrom(lab.Address(127, 1), agentPort)
		// The agent's user can read the system's file, but no file of the lab.
		how, err := b.lab.Agent(ctx, addr, c.control.Addr, "--resolv-conf", "/etc/resolv.conf")
		if err != nil {
			return err
		}
		c.agent, err = b.lab.Start(ctx, lab.Command{Name: lab.AgentName, Argv: how.Argv, User: agentUser})
		if err != nil {
			return err
		}
		direct, asks := lab.Mixes()[0], lab.Checker{Network: "udp", Addr: addr}
		err = c.agent.Await(ctx, lab.StartLimit, func(ctx context.Context) error { return asks.Ask(ctx, direct, b.lab.Services[0]) })
		if err != nil {
			return err
		}
		if err := b.apply(ctx, c.path); err != nil {
			return err
		}
		for _, network := range []string{"udp", "tcp"} {
			asks := lab.Checker{Network: network, Addr: c.target()}
			if err := asks.Check(ctx, direct, b.lab.Services); err != nil {
				return err
			}
		}
		return nil
	})
}

// apply installs the rules of a path. It makes a chain in the backend first, because nametap uses the backend that has
// chains of other programs.
func (b *captureBench) apply(ctx context.Context, p path) error {
	if p.backend == "" {
		return nil
	}
	user := strconv.Itoa(agentUser)
	for _, argv := range [][]string{
		{"iptables-" + p.backend, "-w", "5", "-N", "OTHER"},
		{"ip6tables-" + p.backend, "-w", "5", "-N", "OTHER"},
		{
			b.binary, "capture", "apply", "--capture-enabled", "--log-level", "warn",
			"--dns-addr", fmt.Sprintf("localhost:%d", agentPort), "--capture-agent-uid", user, "--capture-agent-gid", user,
		},
	} {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + b.lab.Dir, "XTABLES_LOCKFILE=" + b.lab.Path("xtables.lock")}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("running %s: %w: %s", filepath.Base(argv[0]), err, out)
		}
	}
	return nil
}

// end stops what begin has started.
func (b *captureBench) end(c *captured) {
	if c.resolver != nil {
		c.resolver.Close()
	}
	if c.agent != nil {
		b.lab.Stop(c.agent)
	}
	if c.control != nil {
		b.lab.Stop(c.control.Process)
	}
	if c.space != nil {
		c.space.Close()
	}
}

// An asked is the cost of some queries.
type asked struct {
	took          []time.Duration
	agent, client time.Duration
}

// turn sends some queries and returns their cost.
func (c *captured) turn(m lab.Manner) (a asked, err error) {
	err = c.space.Do(func() error {
		for range settling {
			if _, err := c.resolver.Ask(m); err != nil {
				return err
			}
		}
		before, err := c.clocks()
		if err != nil {
			return err
		}
		for range captureQueries {
			took, err := c.resolver.Ask(m)
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
	agent, err := lab.ProcessorClock(lab.ClockOf(c.agent.Pid))
	client, err2 := lab.ProcessorClock(unix.CLOCK_THREAD_CPUTIME_ID)
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
func (a asked) enter(f report.Figures, turn int) {
	slices.Sort(a.took)
	n := float64(len(a.took))
	f.Set(captureAgent, turn, lab.Microseconds(a.agent)/n)
	f.Set(captureBoth, turn, lab.Microseconds(a.agent+a.client)/n)
	f.Set(latencyP50, turn, lab.Microseconds(lab.Quantile(a.took, 0.50)))
	f.Set(latencyP99, turn, lab.Microseconds(lab.Quantile(a.took, 0.99)))
}

// table compares the paths.
func (b *captureBench) table(m lab.Manner) report.Table {
	t := report.Table{
		Title:  fmt.Sprintf("A mesh name, %s: medians of %d turns of %d queries", m.What, b.rounds*captureTurns, captureQueries),
		Header: []string{"path"},
	}
	for _, f := range captureFigures() {
		t.Header = append(t.Header, f[1], "× direct")
	}
	direct := b.found[b.paths[0]][m]
	for _, p := range b.paths {
		row := []string{p.what}
		for _, f := range captureFigures() {
			got := b.found[p][m][f[0]]
			row = append(row, report.Cell(got.Median()), report.Cell(got.Over(direct[f[0]]).Median()))
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
