package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/iptables"
)

// A CaptureConfig says which queries are redirected to the agent. It may change while the
// agent runs, except for ResolvConf and the port: see [Agent.SetCapture].
type CaptureConfig struct {
	// On is true if DNS is captured; Because names the setting that decides.
	On      bool
	Because string
	// Config says what is captured. With ResolvConfServers, the nameservers of ResolvConf
	// replace Config.Servers.
	Config iptables.Config
	// Servers says for which nameservers queries are captured. Default all.
	Servers CaptureServers
	// ResolvConf is the path of a resolv.conf. The agent follows its changes. Default
	// /etc/resolv.conf.
	ResolvConf string
	// Resolved is true if the agent registers with systemd-resolved while it captures,
	// if this host runs it.
	Resolved bool
}

// CaptureServers says for which nameservers queries are captured.
type CaptureServers string

// The values of CaptureServers.
const (
	// AllServers captures queries to any server. It is the meaning of the zero value.
	AllServers CaptureServers = "all"
	// ResolvConfServers captures queries to the nameservers of resolv.conf.
	ResolvConfServers CaptureServers = "resolv-conf"
)

// MarshalText returns what UnmarshalText reads.
func (s CaptureServers) MarshalText() ([]byte, error) { return []byte(s), nil }

// UnmarshalText reads one of the values. The error says what was expected; the caller names
// the setting and its value.
func (s *CaptureServers) UnmarshalText(text []byte) error {
	switch v := CaptureServers(text); v {
	case AllServers, ResolvConfServers:
		*s = v
		return nil
	}
	return fmt.Errorf("want %s or %s", AllServers, ResolvConfServers)
}

// A capture computes the desired state from its configuration, the nameservers of resolv.conf
// and the listeners that answer. Package iptables keeps the kernel in that state.
type capture struct {
	log    *slog.Logger
	proxy  *dnsproxy.Server
	kernel *iptables.Capture
	file   *resolvconf.Config // as read at the start; nil if it has no nameservers yet
	ways   *ways
	clock  *clock.Clock
	// registrar registers the agent with systemd-resolved.
	registrar *resolved.Registrar

	mu     sync.Mutex
	inputs inputs // guarded by mu
	begun  bool   // a listener has answered; guarded by mu
}

// newCapture returns the capture of an agent, or an error if its configuration is invalid.
func newCapture(agent Config, proxy *dnsproxy.Server, ticks *clock.Clock) (*capture, error) {
	cfg, log := *agent.Capture, agent.Logger
	c := &capture{log: log, proxy: proxy, clock: ticks, inputs: inputs{CaptureConfig: cfg, passing: map[iptables.Family][]netip.Prefix{}}}
	initial := cfg.Config
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
	c.ways = &ways{log: log, clock: clock.ForPolling(wayInterval), id: agent.DNS.ID, targets: c.probed, direct: c.answers, barred: c.barred, renew: c.kernel.Renew,
		begun: c.kernel.Begun(), rules: c.kernel.Installed(), tick: c.noteListeners, alive: make(chan struct{}),
		passing: func(f iptables.Family, to []netip.Prefix) {
			c.follow(func(in *inputs) {
				in.passing = maps.Clone(in.passing)
				in.passing[f] = to
			})
		}}
	return c, nil
}

// probed returns the nameservers of a family that clients query while their queries are captured, or
// loopback if there are none and queries to any server are captured.
func (c *capture) probed(f iptables.Family) []netip.Addr {
	in := c.current()
	if !in.On || in.Config.Family(f) == iptables.Off || c.listens(f) != nil || c.kernel.Missing(f) {
		return nil
	}
	var found []netip.Addr
	for _, server := range in.servers {
		if iptables.FamilyOf(server) == f && !slices.Contains(found, server) && !iptables.Passes(server) {
			found = append(found, server)
		}
	}
	if len(found) == 0 && in.Servers != ResolvConfServers {
		return []netip.Addr{f.Loopback()}
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

// run keeps the kernel in the desired state until ctx ends, then removes the rules unless they
// stay for the next agent. If capture is on at the start and no rules can be installed, it
// returns an error. Later failures are logged and retried.
func (c *capture) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var followers sync.WaitGroup
	alive := c.takeOver()
	followers.Go(func() { c.ways.run(ctx, alive) })
	defer followers.Wait()
	defer stop()
	if err := c.begin(ctx); err != nil || ctx.Err() != nil {
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
	return errors.Join(err, c.registrar.Remove(context.WithoutCancel(ctx)))
}

// takeOver renews the lease of the previous agent once, before this one answers: queries wait in
// the sockets that systemd holds. After a failed start it does not renew, so that an agent that
// fails at each start does not keep the capture alive. It reports whether a lease is alive.
func (c *capture) takeOver() (alive bool) { return c.extend(firstStart()) }

// extend reports whether a lease is alive. With renew it renews live leases, for the next agent.
func (c *capture) extend(renew bool) (alive bool) {
	for _, f := range c.wanted() {
		leased, err := iptables.Leased(f)
		if err != nil || !leased {
			continue
		}
		alive = true
		if !renew {
			continue
		}
		if err := c.kernel.Renew(f); err != nil {
			c.log.Warn("queries may go to nameservers until the next agent answers", "family", f, "error", err)
		}
	}
	return alive
}

// begin waits for the listeners, because without them DNS would fail once the rules are
// installed, and sets the first desired state.
func (c *capture) begin(ctx context.Context) error {
	c.listening(ctx)
	without := c.unserved()
	err := c.change(func(in *inputs) { in.without, c.begun = without, true })
	if err != nil && !errors.Is(err, errNoServers) && ctx.Err() == nil {
		return fmt.Errorf("capturing DNS: %w", err)
	}
	return nil
}

// unserved returns the families that the agent does not listen on, and why. Among them are families that the
// configuration switches off, because that may change.
func (c *capture) unserved() map[iptables.Family]error {
	without := make(map[iptables.Family]error)
	for _, f := range families() {
		if err := c.listens(f); err != nil {
			without[f] = err
		}
	}
	return without
}

// noteListeners captures a family when its listeners could be opened.
func (c *capture) noteListeners() {
	in, without := c.current(), c.unserved()
	if in.without != nil && len(without) != len(in.without) {
		c.follow(func(in *inputs) { in.without = without })
	}
}

// endSoon reports whether the agent ends without a drain, and makes the end of run as quick. With
// handOver the rules stay, if the kernel ends the capture in case no agent follows. drains is
// true if the agent drains after a removal.
func (c *capture) endSoon(handOver, drains bool) bool {
	switch {
	case handOver && c.kernel.Leased():
		c.kernel.SetEnding(iptables.Leave)
		return true
	case drains || !c.kernel.Captured():
		return false
	}
	c.kernel.SetEnding(iptables.Soon)
	return true
}

// change changes the inputs, computes the desired state and passes it to iptables. If the
// inputs have no desired state, it returns an error, and capture stays unchanged. Before the
// first probe of the listeners, it passes nothing to iptables.
func (c *capture) change(change func(in *inputs)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.inputs)
	c.registrar.Set(c.inputs.On && c.inputs.Resolved)
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
	in.without = maps.Clone(in.without)
	return in
}

// follow calls change, and logs the error.
func (c *capture) follow(change func(in *inputs)) {
	if err := c.change(change); err != nil && !errors.Is(err, errNoServers) {
		c.log.Error("capture stays unchanged", "error", err)
	}
}

// inputs are the inputs of the desired value.
type inputs struct {
	CaptureConfig
	servers []netip.Addr                       // of resolv.conf; none until it has any
	without map[iptables.Family]error          // families that the agent does not listen on, and why
	passing map[iptables.Family][]netip.Prefix // destinations to which queries have to pass through
	vips    []netip.AddrPort                   // the listeners for connections to VIPs
}

// errNoServers is returned if resolv.conf has not had nameservers yet.
var errNoServers = errors.New("resolv.conf names no nameserver to capture queries for")

// desired returns the value that these inputs make. The error says why there is none; capture
// then stays unchanged.
func (in inputs) desired() (iptables.Desired, error) {
	d := iptables.Desired{On: in.On, Because: in.Because, Config: in.Config}
	d.Config.Lease = !in.Config.FailClosed
	if !in.On {
		return d, nil
	}
	for _, f := range families() {
		d.Config.ExcludeCIDRs = slices.Concat(d.Config.ExcludeCIDRs, in.passing[f])
	}
	for _, f := range families() {
		// Another program may listen on the port, and would get the connections.
		if !slices.ContainsFunc(in.vips, func(l netip.AddrPort) bool {
			return iptables.FamilyOf(l.Addr()) == f && l.Port() == in.Config.EgressPort
		}) {
			d.Config = d.Config.WithoutVIPs(f)
		}
	}
	if in.Servers == ResolvConfServers {
		if len(in.servers) == 0 { // none would mean all
			return d, errNoServers
		}
		d.Config.Servers = in.servers
	}
	served := 0
	var errs []error
	for _, f := range families() {
		switch choice, err := in.Config.Family(f), in.without[f]; {
		case choice == iptables.Off:
		case err == nil:
			served++
		default:
			errs = append(errs, err)
			d.Config = d.Config.Without(f)
		}
	}
	if served == 0 {
		return d, errors.Join(errs...)
	}
	return d, nil
}

// followServers follows the nameservers of resolv.conf until ctx ends.
func (c *capture) followServers(ctx context.Context) {
	watcher := resolvconf.Watcher{
		Files: clientsFile(c.current().ResolvConf), Clock: c.clock, Current: c.file,
		Changed: func(file *resolvconf.Config) {
			c.follow(func(in *inputs) { in.servers = addrs(file) })
		},
		Failed: func(err error) {
			if in := c.current(); in.Servers == ResolvConfServers && len(in.servers) > 0 { // without servers that was logged
				c.log.Warn("resolv.conf has no usable nameservers; capture keeps the previous ones", "error", err)
			}
		},
	}
	_ = watcher.Run(ctx) // it returns nil
}

// CapturedServers returns the nameservers that clients query according to a resolv.conf.
func CapturedServers(path string) ([]netip.Addr, error) {
	file, err := readServers(path)
	if err != nil {
		return nil, err
	}
	return addrs(file), nil
}

// readServers reads a resolv.conf that has nameservers.
func readServers(path string) (*resolvconf.Config, error) {
	file, err := clientsFile(path).Read()
	if err == nil && len(file.Servers) == 0 {
		err = errors.New("the file names none")
	}
	if err != nil {
		return nil, fmt.Errorf("capturing queries for the nameservers of %s: %w", path, err)
	}
	return file, nil
}

// clientsFile returns a resolv.conf as clients read it: if it names a stub resolver, they query
// that and not the nameservers behind it.
func clientsFile(path string) resolvconf.Files {
	return resolvconf.Files{Path: path, Uplink: os.DevNull}
}

// addrs returns the addresses of nameservers.
func addrs(file *resolvconf.Config) []netip.Addr {
	var found []netip.Addr
	for _, server := range file.Servers {
		found = append(found, server.Addr())
	}
	return found
}
