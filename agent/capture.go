package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/guard"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/iptables"
)

// A capture computes the desired state of the rules from its configuration, the nameservers of resolv.conf and the open
// listeners. Package iptables keeps the kernel in that state.
type capture struct {
	log    *slog.Logger
	proxy  *dnsproxy.Server
	kernel *iptables.Capture
	file   *resolvconf.Config // resolv.conf as read at the start; nil if it had no nameservers
	ways   *ways
	clock  *clock.Clock
	seat   *seat
	// registrar registers the agent with systemd-resolved.
	registrar *resolved.Registrar

	mu       sync.Mutex
	inputs   inputs    // guarded by mu
	begun    bool      // whether the method begin has waited for the listeners; guarded by mu
	repairs  uint64    // as of the last reading; guarded by mu
	repaired time.Time // when a reading last found more of them; guarded by mu
}

// newCapture returns the capture of an agent, or an error if its configuration is invalid.
func newCapture(agent Config, proxy *dnsproxy.Server, pollClock *clock.Clock) (*capture, error) {
	cfg, log := *agent.Capture, agent.Logger
	c := &capture{
		log: log, proxy: proxy, clock: pollClock, seat: &seat{log: log, users: cfg.Config.AgentUIDs, waits: make(chan struct{}), peers: map[net.Conn]string{}},
		inputs: inputs{CaptureConfig: cfg, policy: agent.Guard.Policy()},
	}
	initial := WithPolicy(cfg.Config, c.inputs.policy)
	file, err := readServers(cfg.ResolvConf)
	switch {
	case err == nil:
		c.file, c.inputs.servers = file, addrs(file)
	case cfg.Servers == ResolvConfServers:
		log.Warn("nothing is captured until there are nameservers", "error", err)
	}
	if cfg.Servers == ResolvConfServers {
		initial.Servers = c.inputs.servers
	}
	if c.kernel, err = iptables.New(initial, log); err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	c.ways = &ways{
		log: log, clock: clock.ForPolling(wayInterval), id: agent.DNS.ID, alive: make(chan struct{}),
		targets: c.probed, direct: c.probeListener, isBarred: c.barred,
		beforeRound: func() { c.noteListeners(); c.notePolicy(agent.Guard.Policy()) },
		renew:       c.kernel.Renew, onMiss: c.kernel.Look, lapses: lapses{log: log}, begun: c.kernel.Begun(), rules: c.kernel.Installed(),
		setPassing: func(to map[family.Family][]netip.Prefix) { c.tryChange(func(in *inputs) { in.passing = to }) },
	}
	c.ways.status.Store(new([]Way))
	return c, nil
}

// run waits for the seat, and then keeps the kernel in the desired state until ctx ends. Then it removes the rules,
// unless they stay for the next agent. If capture is on at the start and no rules can be installed, run returns an error.
// It logs and retries later failures.
//
// A hand-over to the next agent needs rules with a lease: if no agent renews the lease in time, the kernel ends the
// capture. First, the method endSoon tells package iptables to leave the rules in place. Next, [Agent.Run] renews the
// lease after this agent has answered its last query. Finally, the next agent renews the lease in the method takeOver.
func (c *capture) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	release := c.seat.take(ctx)
	if release == nil {
		return nil
	}
	defer release()
	var followers sync.WaitGroup
	alive := c.takeOver()
	followers.Go(func() { c.ways.run(ctx, alive) })
	defer followers.Wait()
	defer stop()
	if err := c.begin(ctx); err != nil {
		return err
	}
	followers.Go(func() { c.followServers(ctx) })
	followers.Go(func() { c.registrar.Run(ctx) })
	err := c.kernel.Keep(ctx)
	stop()
	followers.Wait()
	if c.kernel.Captured() { // the rules and the registration stay
		return err
	}
	return errors.Join(err, c.registrar.Remove())
}

// takeOver renews the lease of the rules that the previous agent has left. The queries that they redirect wait in the
// sockets that systemd holds, until this agent answers. After a failed start, takeOver does not renew the lease: an
// agent that fails at each start must not keep the capture alive. The result is true if the lease of any family has not
// expired. If there are rules, but all leases have expired, no agent has answered for a time.
func (c *capture) takeOver() (alive bool) {
	if alive = c.extend(firstStart()); alive {
		return true
	}
	for _, f := range c.current().Config.Families() {
		if left, err := c.kernel.EndLease(f); err == nil && left {
			c.ways.lapses.add(LapseDead)
			break
		}
	}
	return false
}

// extend reports whether any family has a lease that has not expired. If renew is true, it also renews each such lease.
func (c *capture) extend(renew bool) (alive bool) {
	for _, f := range c.current().Config.Families() {
		leased, err := iptables.Leased(f)
		if err != nil || !leased {
			continue
		}
		alive = true
		if !renew {
			continue
		}
		if err := c.kernel.Renew(f); err != nil {
			c.log.Warn("the lease was not renewed: queries may go to nameservers until an agent answers", "family", f, "error", err)
		}
	}
	return alive
}

// guardWait is how long the rules of a guard wait for a listener at the start.
const guardWait = 5 * time.Second

// begin waits for the listeners, and then sets the first desired state. Without listeners, DNS would fail once the rules
// are installed. Those of a policy that is enforced do not wait for long.
func (c *capture) begin(ctx context.Context) error {
	listening, cancel := ctx, func() {}
	if c.current().policy.Enforces() {
		listening, cancel = context.WithTimeout(ctx, guardWait)
	}
	c.awaitListening(listening)
	cancel()
	unserved := c.unserved()
	err := c.change(func(in *inputs) { in.unserved, c.begun = unserved, true })
	if err != nil && !errors.Is(err, errNoServers) && ctx.Err() == nil {
		return fmt.Errorf("capturing DNS: %w", err)
	}
	return nil
}

// awaitListening waits until the listeners are open. Then, if the rules redirect queries to any of the listeners, it
// waits until one of these listeners answers. It returns early if ctx ends.
func (c *capture) awaitListening(ctx context.Context) {
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
	}
	_ = until(ctx, c.log.Warn, "DNS is not captured yet: no listener answers", func() (silent error) {
		for _, f := range c.current().Config.Families() {
			if c.listenError(f) != nil {
				continue
			}
			r := c.probeListener(ctx, f, "udp")
			if r.Answered() {
				return nil
			}
			silent = errors.Join(silent, r.Err())
		}
		return silent
	})
}

// probeListener probes the listener to which the rules of family f redirect queries over network, which is udp or tcp.
func (c *capture) probeListener(ctx context.Context, f family.Family, network string) probe.Result {
	return probe.Query{Network: network, To: netip.AddrPortFrom(f.Loopback(), c.current().Config.Port).String()}.Ask(ctx)
}

// listenError returns an error unless the agent listens, over UDP and TCP, on the address to which the rules of family
// f redirect queries.
func (c *capture) listenError(f family.Family) error {
	for _, network := range []string{"udp", "tcp"} {
		if !slices.ContainsFunc(c.proxy.Addrs(), func(l dnsproxy.Addr) bool {
			addr, err := netip.ParseAddrPort(l.Address)
			return err == nil && l.Network == network && family.Of(addr.Addr()) == f && c.current().Config.Serves(addr)
		}) {
			return fmt.Errorf("the agent does not listen where the rules redirect to: want %s port %d over %s, have %v",
				network, c.current().Config.Port, f, c.proxy.Addrs())
		}
	}
	return nil
}

// unserved returns, for each family that the agent does not listen on, why it does not. It includes families that
// the configuration switches off, because the configuration may change.
func (c *capture) unserved() map[family.Family]error {
	unserved := make(map[family.Family]error)
	for _, f := range family.All() {
		if err := c.listenError(f); err != nil {
			unserved[f] = err
		}
	}
	return unserved
}

// noteListeners updates the desired state if the agent listens on more or fewer families than before.
func (c *capture) noteListeners() {
	in, unserved := c.current(), c.unserved()
	if in.unserved != nil && len(unserved) != len(in.unserved) {
		c.tryChange(func(in *inputs) { in.unserved = unserved })
	}
}

// notePolicy updates the desired state if the guard has another policy than before.
func (c *capture) notePolicy(p *guard.Policy) {
	if p != c.current().policy {
		c.tryChange(func(in *inputs) { in.policy = p })
	}
}

// probed returns the addresses of family f to which c.ways sends probes: the nameservers of resolv.conf. It leaves out
// nameservers for which the rules never redirect queries. If no nameserver is left, and queries to all servers are
// captured, probed returns the stand-in for all of them. While queries over f are not captured, it returns no address.
func (c *capture) probed(f family.Family) []netip.Addr {
	in := c.current()
	if !in.On || !in.Config.Has(f) || c.listenError(f) != nil || c.kernel.Failure(f) != nil {
		return nil
	}
	var found []netip.Addr
	for _, server := range in.servers {
		if family.Of(server) == f && !slices.Contains(found, server) && !iptables.Passes(server) {
			found = append(found, server)
		}
	}
	if len(found) == 0 && in.Servers != ResolvConfServers {
		return []netip.Addr{standIn(f)}
	}
	return found
}

// barred reports whether a firewall of this host drops all queries that the agent sends to nameservers.
func (c *capture) barred() (all bool) {
	for _, s := range c.proxy.UpstreamStatus() {
		if s.Requests > 0 && !s.Barred {
			return false
		}
		all = all || s.Barred
	}
	return all
}

// waits reports whether this agent waits for another one, which captures.
func (c *capture) waits() bool { return chans.Closed(c.seat.waits) && !chans.Closed(c.kernel.Begun()) }

// awaitBegun waits until the first rules are installed. If capture is off, it waits until the removal of rules has
// begun. If capture is on, it then waits until an answer to a probe has renewed the lease of the rules, but no longer
// than iptables.LeaseTime. It returns early if ctx ends, or if this agent waits for another one.
func (c *capture) awaitBegun(ctx context.Context) {
	select {
	case <-c.seat.waits:
		return
	case <-c.kernel.Begun():
	case <-ctx.Done():
	}
	if !c.current().On {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, iptables.LeaseTime)
	defer cancel()
	select {
	case <-c.ways.alive:
	case <-ctx.Done():
	}
}

// handOverTimeout is how long queries in flight may take at the end of an agent that another one follows, for whose
// start half of the lease is left. Meanwhile new queries wait in the sockets.
const handOverTimeout = iptables.LeaseTime / 2

// endSoon reports whether the agent ends without a drain. If handOver is true, rules with a lease, and rules of the previous
// agent, stay: if no agent follows, the kernel ends their capture. Otherwise, before an end without a drain, run removes the
// rules and waits only briefly for replies. The parameter drains is true if the settings want a drain after that.
func (c *capture) endSoon(handOver, drains bool) bool {
	switch {
	case handOver && (c.kernel.Leased() || !chans.Closed(c.kernel.Begun())):
		c.kernel.SetEnding(iptables.Leave)
		return true
	case drains, !c.kernel.Captured() && chans.Closed(c.kernel.Begun()):
		return false
	}
	c.kernel.SetEnding(iptables.Soon)
	return true
}

// change calls the function edit with the inputs, computes the desired state from them, and passes it to package
// iptables. If there is no desired state for the inputs, for example because resolv.conf has no nameservers, it returns
// an error, and the rules stay unchanged. Until the method begin has waited for the listeners, change passes nothing to
// package iptables.
func (c *capture) change(edit func(in *inputs)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	edit(&c.inputs)
	d, err := c.inputs.desired()
	if err != nil || !c.begun {
		return err
	}
	return c.kernel.Set(d)
}

// current returns a copy of the inputs.
func (c *capture) current() inputs {
	c.mu.Lock()
	defer c.mu.Unlock()
	in := c.inputs
	in.unserved = maps.Clone(in.unserved)
	return in
}

// tryChange calls c.change with edit, and logs the error.
func (c *capture) tryChange(edit func(in *inputs)) {
	if err := c.change(edit); err != nil && !errors.Is(err, errNoServers) {
		c.log.Error("capture stays unchanged", "error", err)
	}
}

// followServers follows the nameservers of resolv.conf until ctx ends.
func (c *capture) followServers(ctx context.Context) {
	watcher := resolvconf.Watcher{
		Files: clientsFile(c.current().ResolvConf), Clock: c.clock, Current: c.file,
		Changed: func(file *resolvconf.Config) {
			c.tryChange(func(in *inputs) { in.servers = addrs(file) })
		},
		Failed: func(err error) {
			if in := c.current(); in.Servers == ResolvConfServers && len(in.servers) > 0 { // newCapture has logged the lack of servers
				c.log.Warn("resolv.conf has no usable nameservers; capture keeps the previous ones", "error", err)
			}
		},
	}
	_ = watcher.Run(ctx) // it returns nil
}

// inputs are the values from which the desired state is computed.
type inputs struct {
	CaptureConfig
	servers  []netip.Addr            // the nameservers that resolv.conf has, or last had
	unserved map[family.Family]error // families that the agent does not listen on, and why
	// passing has the destinations whose queries are not redirected, although capture is on: redirected queries would
	// not reach the agent, or a firewall drops the queries of the agent.
	passing map[family.Family][]netip.Prefix
	vips    []netip.AddrPort // the listeners for connections to VIPs
	policy  *guard.Policy    // of the guard; nil without one
}

// errNoServers is returned if resolv.conf has not had nameservers yet.
var errNoServers = errors.New("resolv.conf names no nameserver to capture queries for")

// desired returns the desired state for these inputs. If there is none, the error says why, and capture
// stays unchanged.
func (in inputs) desired() (iptables.Desired, error) {
	d := iptables.Desired{On: in.On, Because: in.Because, Config: WithPolicy(in.Config, in.policy)}
	d.Config.Lease = !in.Config.FailClosed
	if !in.On {
		return d, nil
	}
	for _, f := range family.All() {
		if !in.policy.Enforces() {
			d.Config.ExcludeCIDRs = slices.Concat(d.Config.ExcludeCIDRs, in.passing[f])
		}
	}
	for _, f := range family.All() {
		// If the agent does not listen for VIPs, another program may listen on that port and would get the connections.
		if !slices.ContainsFunc(in.vips, func(l netip.AddrPort) bool {
			return family.Of(l.Addr()) == f && l.Port() == in.Config.EgressPort
		}) {
			d.Config = d.Config.WithoutVIPs(f)
		}
	}
	if in.Servers == ResolvConfServers {
		if len(in.servers) == 0 && in.policy == nil { // in d.Config, no servers means all
			return d, errNoServers
		}
		d.Config.Servers = in.servers
	}
	served := 0
	var errs []error
	for _, f := range family.All() {
		switch err := in.unserved[f]; {
		case !in.Config.Has(f):
		case err == nil:
			served++
		default:
			errs = append(errs, err)
			d.Config = d.Config.Without(f)
		}
	}
	d.Config.GuardOnly = served == 0 && in.policy.Enforces()
	if served == 0 && !d.Config.GuardOnly {
		return d, errors.Join(errs...)
	}
	return d, nil
}

// status returns the state of capture. It reads the rules in the kernel.
func (c *capture) status(ctx context.Context) *CaptureStatus {
	in := c.current()
	status := &CaptureStatus{On: in.On, Because: in.Because, Repairs: c.kernel.Stats().Repairs, Remaining: c.kernel.Remaining()}
	status.Ways, status.Lapses, status.Resolved = c.ways.states(), c.ways.lapses.list(), c.registrar.Status()
	status.Others = c.seat.others()
	rules, err := c.kernel.Status(ctx)
	if err != nil {
		status.Error = err.Error()
		return status
	}
	for i, f := range rules.Families {
		if err := in.unserved[f.Family]; err != nil && in.Config.Has(f.Family) && f.State == iptables.NotWanted {
			rules.Families[i].Error = err.Error()
		}
	}
	status.Rules = &rules
	return status
}
