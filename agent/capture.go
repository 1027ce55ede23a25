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
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/guard"
	"github.com/nametap/nametap/iptables"
	"github.com/nametap/nametap/resolved"
)

// A CaptureConfig says which queries are redirected to the agent. It may change while the
// agent runs, except for ResolvConf and the port: see [Agent.SetCapture].
type CaptureConfig struct {
	// On says whether DNS is captured, and Because which setting says so.
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
	// Resolved says whether the agent registers with systemd-resolved while it captures, if
	// this host runs it.
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
	guard  *guard.Client      // nil without a guard
	// registrar registers the agent with systemd-resolved.
	registrar *resolved.Registrar

	mu     sync.Mutex
	inputs inputs // guarded by mu
	begun  bool   // the listeners were probed; guarded by mu
}

// newCapture returns the capture of an agent, or an error if its configuration is invalid.
func newCapture(agent Config, proxy *dnsproxy.Server) (*capture, error) {
	cfg, log := *agent.Capture, agent.Logger
	c := &capture{log: log, proxy: proxy, inputs: inputs{CaptureConfig: cfg}}
	if agent.GuardPath != "" {
		c.guard = guard.NewClient(agent.GuardPath, log)
		c.guard.SetFailOpen(!cfg.Config.FailClosed)
	}
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
	return c, nil
}

// run keeps the kernel in the desired state until ctx ends, then removes the rules unless they
// stay for the next agent. If capture is on at the start and no rules can be installed, it
// returns an error. Later failures are logged and retried.
func (c *capture) run(ctx context.Context) error {
	if err := c.begin(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	var followers sync.WaitGroup
	followers.Go(func() { c.followListeners(ctx) })
	followers.Go(func() { c.followServers(ctx) })
	followers.Go(func() { c.registrar.Run(ctx) })
	err := c.kernel.Keep(ctx)
	stop()
	followers.Wait()
	if c.kernel.Captured() { // the rules stay, and so does the registration
		return err
	}
	if c.guard != nil && err == nil {
		telling, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		c.guard.Enter(guard.Removed)
		c.guard.Await(telling, guard.Removed)
	}
	return errors.Join(err, c.registrar.Remove(context.WithoutCancel(ctx)))
}

// begin waits for the listeners, because without them DNS would fail once the rules are
// installed, and sets the first desired state. With a guard it first waits until that holds
// the rules: without it they would stay after a crash.
func (c *capture) begin(ctx context.Context) error {
	without := c.listening(ctx)
	if c.guard != nil && ctx.Err() == nil {
		c.guard.Enter(guard.Answering)
		c.guard.Await(ctx, guard.Answering)
	}
	err := c.change(func(in *inputs) { in.without, c.begun = without, true })
	if err != nil && !errors.Is(err, errNoServers) && ctx.Err() == nil {
		return fmt.Errorf("capturing DNS: %w", err)
	}
	for _, f := range c.wanted() {
		if reason := without[f]; reason != nil && ctx.Err() == nil {
			c.logLeftOut(f, reason)
		}
	}
	return nil
}

// guardTimeout is how long a hand-over waits for a guard that restarts.
const guardTimeout = time.Second

// endSoon reports whether the agent ends without a drain, and makes the end of run as quick. With
// handOver the rules stay if a guard removes them later. drains says that the agent drains after
// a removal.
func (c *capture) endSoon(ctx context.Context, handOver, drains bool) bool {
	if handOver && c.kernel.Captured() {
		waiting, cancel := context.WithTimeout(ctx, guardTimeout)
		defer cancel()
		c.guard.Await(waiting, guard.Answering)
	}
	switch {
	case handOver && c.guard.Held():
		c.guard.Enter(guard.Ending)
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
	if c.guard != nil {
		c.guard.SetFailOpen(!c.inputs.Config.FailClosed)
	}
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
	servers []netip.Addr              // of resolv.conf; none until it has any
	without map[iptables.Family]error // families whose listeners do not answer, and why
	vips    []netip.AddrPort          // the listeners for connections to VIPs
}

// errNoServers says that resolv.conf has not had nameservers yet.
var errNoServers = errors.New("resolv.conf names no nameserver to capture queries for")

// desired returns the value that these inputs make. The error says why there is none; capture
// then stays unchanged.
func (in inputs) desired() (iptables.Desired, error) {
	d := iptables.Desired{On: in.On, Because: in.Because, Config: in.Config}
	if !in.On {
		return d, nil
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
		case choice == iptables.On:
			return d, err
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

// captures reports whether a family is captured while the switch is on.
func (in inputs) captures(f iptables.Family) bool {
	return in.Config.Family(f) != iptables.Off && in.without[f] == nil
}

// followServers follows the nameservers of resolv.conf until ctx ends.
func (c *capture) followServers(ctx context.Context) {
	watcher := resolvconf.Watcher{
		Files: clientsFile(c.current().ResolvConf), Current: c.file,
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
