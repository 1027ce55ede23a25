package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/iptables"
)

// A CaptureConfig says which queries the agent has redirected to itself.
type CaptureConfig struct {
	// Rules is the configuration of the rules. If ResolvConf is set, its Servers
	// are those of that file.
	Rules iptables.Config
	// ResolvConf is a resolv.conf whose nameservers' queries alone are captured;
	// empty means as Rules says. It is followed when it changes.
	ResolvConf string
	// FailClosed leaves the rules in at the end, so that queries are refused, or wait in
	// sockets that somebody holds, until there is an agent again.
	FailClosed bool
	// Switch reads whether to capture at all. It is called four times a second; after an
	// error, what it said before holds.
	Switch func() (Switch, error)
}

// A Switch says whether DNS is to be captured.
type Switch struct {
	On      bool
	Because string // what sets it
}

const (
	// switchInterval is how often the switch is read.
	switchInterval = 250 * time.Millisecond
	// removeTimeout bounds the removal of rules at the end: the settle time of
	// queries in flight, and the tools.
	removeTimeout = 15 * time.Second
)

// A capture keeps the rules as the switch says.
type capture struct {
	config CaptureConfig
	log    *slog.Logger
	proxy  *dnsproxy.Server
	rules  *iptables.Capture
	unfit  error // why rules would lead nowhere, once we listen

	changing    sync.Mutex // held by reconfigure; guards config.Rules.Servers
	withoutIPv6 bool       // its listeners do not answer

	resolvConf *resolvconf.Config // as read at the start; nil if there is nothing to read yet
	serverless atomic.Bool        // it has no nameservers yet whose queries to capture

	begun   chan struct{} // closed when the switch was followed for the first time
	state   atomic.Pointer[captureState]
	removal *removal // in progress, of follow's goroutine
}

// A removal goes on for as long as replies may be on their way.
type removal struct {
	cancel context.CancelFunc
	began  time.Time
	ended  chan struct{}
}

// A captureState is what was last done.
type captureState struct {
	Switch
	tried    bool   // rules were put in, with success or not: some may be in
	applied  bool   // all of them are in, as far as we know
	removing bool   // they are to go, and that is not done
	failed   string // why not, empty if that goes on
}

// newCapture checks the configuration.
func newCapture(cfg CaptureConfig, proxy *dnsproxy.Server, log *slog.Logger) (*capture, error) {
	c := &capture{config: cfg, log: log, proxy: proxy, begun: make(chan struct{})}
	c.state.Store(&captureState{})
	if cfg.ResolvConf != "" {
		conf, err := readServers(cfg.ResolvConf)
		if err != nil {
			log.Warn("nothing is captured until there are nameservers", "error", err)
			c.serverless.Store(true)
		} else {
			c.resolvConf, c.config.Rules.Servers = conf, addrs(conf)
		}
	}
	rules, err := iptables.New(c.config.Rules, log)
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	c.rules = rules
	return c, nil
}

// CapturedServers returns the nameservers that a resolv.conf has clients ask.
func CapturedServers(path string) ([]netip.Addr, error) {
	conf, err := readServers(path)
	if err != nil {
		return nil, err
	}
	return addrs(conf), nil
}

// readServers reads a resolv.conf that has nameservers.
func readServers(path string) (*resolvconf.Config, error) {
	conf, err := clientsFile(path).Read()
	if err == nil && len(conf.Servers) == 0 {
		err = errors.New("want at least one there")
	}
	if err != nil {
		return nil, fmt.Errorf("capturing queries for the nameservers of %s: %w", path, err)
	}
	return conf, nil
}

// clientsFile is a resolv.conf as clients read it: if there is a stub in it they ask
// that, and not the nameservers behind it.
func clientsFile(path string) resolvconf.Files {
	return resolvconf.Files{Path: path, Uplink: os.DevNull}
}

// addrs returns the addresses of nameservers.
func addrs(conf *resolvconf.Config) []netip.Addr {
	var found []netip.Addr
	for _, server := range conf.Servers {
		found = append(found, server.Addr())
	}
	return found
}

// run keeps the rules until ctx ends, and takes them out then. The first time that
// they are wanted and cannot be had is an error; later it is logged, and tried again.
func (c *capture) run(ctx context.Context) error {
	c.listening(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	// The loop ends before the rules go, or it would mend them.
	keeping, stop := context.WithCancel(ctx)
	parts.Go(func() { _ = c.rules.Run(keeping) }) // it returns nil
	parts.Go(func() { c.followFamilies(keeping) })
	if c.config.ResolvConf != "" {
		parts.Go(func() { c.followServers(keeping) })
	}
	err := c.follow(ctx)
	stop()
	c.endRemoval()
	parts.Wait()
	return errors.Join(err, c.leave(context.WithoutCancel(ctx)))
}

// follow does what the switch says until ctx ends. A change must read the same twice: a
// file that is written in place is empty for a moment, which says on.
func (c *capture) follow(ctx context.Context) error {
	ticker := time.NewTicker(switchInterval)
	defer ticker.Stop()
	var said string
	var last Switch
	for first := true; ctx.Err() == nil; first = false {
		to, err := c.config.Switch()
		if err == nil && (first || to == last) {
			err = c.turn(ctx, to)
		}
		last = to
		if first {
			if err != nil && ctx.Err() == nil {
				return fmt.Errorf("capturing DNS: %w", err)
			}
			close(c.begun)
		}
		said = c.say(ctx, err, said)
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
	return nil
}

// say logs a failure that is not the one said before, and returns what it said.
func (c *capture) say(ctx context.Context, err error, said string) string {
	if err == nil || ctx.Err() != nil {
		return ""
	}
	if text := err.Error(); text != said {
		c.log.Error("capture stays as it is", "error", err)
		return text
	}
	return said
}

// turn turns the capture on or off, if it is not so yet.
func (c *capture) turn(ctx context.Context, to Switch) error {
	state := *c.state.Load()
	if state.Because != "" && state.On == to.On && state.applied == to.On && !state.removing {
		state.Switch = to
		c.state.Store(&state)
		return nil
	}
	if !to.On {
		c.startRemoval(ctx, to)
		return nil
	}
	if c.serverless.Load() {
		c.state.Store(&captureState{Switch: to})
		return nil
	}
	err := c.apply(ctx)
	c.state.Store(&captureState{Switch: to, tried: c.unfit == nil, applied: err == nil})
	return err
}

// apply puts the rules in. A removal that is going on leaves them in place then; what it
// had done before, is done again. Rules that are incomplete are in, and the loop that
// looks after them goes on trying.
func (c *capture) apply(ctx context.Context) error {
	if c.unfit != nil {
		return c.unfit
	}
	err := c.rules.Apply(ctx)
	if c.removal != nil {
		c.endRemoval()
		err = c.rules.Apply(ctx)
	}
	if errors.Is(err, iptables.ErrIncomplete) {
		c.log.Error("capture is incomplete and is tried again", "error", err)
		return nil
	}
	return err
}

// startRemoval takes the rules out, also those that an agent before this one has left,
// unless that is going on already. If it fails it is tried again after a while: what is
// told apart is a backend that this process may not read at all, where only an agent
// before it can have left rules.
func (c *capture) startRemoval(ctx context.Context, to Switch) {
	if c.removal != nil {
		select {
		case <-c.removal.ended:
			if time.Since(c.removal.began) < removeTimeout {
				return
			}
		default:
			return
		}
	} else {
		c.log.Info("DNS is not captured", "because", to.Because)
	}
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	r := &removal{cancel: cancel, began: time.Now(), ended: make(chan struct{})}
	c.removal = r
	before := c.state.Load()
	state := captureState{Switch: to, tried: before.tried, applied: before.applied, removing: true, failed: before.failed}
	c.state.Store(&state)
	go func() {
		defer close(r.ended)
		defer cancel()
		err := c.remove(ctx)
		switch {
		case err == nil:
			c.state.Store(&captureState{Switch: to})
		case errors.Is(ctx.Err(), context.Canceled):
		case !state.applied && (errors.Is(err, iptables.ErrUnseen) || errors.Is(err, iptables.ErrCapability)):
			c.log.Warn("whether an agent before has left capture rules cannot be seen", "error", err)
			c.state.Store(&captureState{Switch: to}) // we have put none in
		default:
			c.log.Error("capture rules cannot be taken out and are tried again", "error", err)
			state.failed = err.Error()
			c.state.Store(&state)
		}
	}()
}

// remove takes the rules out. With ErrUnseen those of this agent are out, and only rules
// of an agent before it can remain.
func (c *capture) remove(ctx context.Context) error {
	err := c.rules.Remove(ctx)
	if errors.Is(err, iptables.ErrUnseen) && c.state.Load().applied {
		c.log.Info("the capture rules of this agent are out", "unseen", err)
		return nil
	}
	return err
}

// endRemoval ends the removal that is going on; what it has not done is left.
func (c *capture) endRemoval() {
	if c.removal != nil {
		c.removal.cancel()
		<-c.removal.ended
		c.removal = nil
	}
}

// followServers exchanges the rules when resolv.conf has other nameservers.
func (c *capture) followServers(ctx context.Context) {
	watcher := resolvconf.Watcher{
		Files: clientsFile(c.config.ResolvConf), Current: c.resolvConf,
		Changed: func(conf *resolvconf.Config) {
			servers := addrs(conf)
			if len(servers) == 0 {
				return // none would mean all
			}
			defer c.serverless.Store(false)
			if err := c.reconfigure(ctx, func() { c.config.Rules.Servers = servers }); err != nil {
				c.log.Error("queries for the nameservers that resolv.conf has now are not captured", "servers", servers, "error", err)
			}
		},
		Failed: func(err error) {
			if c.serverless.Load() {
				return // which was said
			}
			c.log.Warn("queries for the nameservers that resolv.conf had are captured", "error", err)
		},
	}
	_ = watcher.Run(ctx) // it returns nil
}

// leave takes the rules out at the end, unless they are to stay.
func (c *capture) leave(ctx context.Context) error {
	state := c.state.Load()
	switch {
	case !state.tried && !state.removing, !state.applied && !state.removing && c.config.FailClosed:
		return nil
	case !state.removing && c.config.FailClosed:
		c.log.Warn("the capture rules stay: queries wait for the next agent, or are refused", "instead", "nametap capture remove")
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, removeTimeout)
	defer cancel()
	err := c.remove(ctx)
	if !state.applied && errors.Is(err, iptables.ErrUnseen) { // as far as they can be seen
		err = nil
	}
	if err != nil {
		return fmt.Errorf("taking the capture rules out, which `nametap capture remove` does too: %w", err)
	}
	c.state.Store(&captureState{Switch: state.Switch})
	c.log.Info("the capture rules are out")
	return nil
}
