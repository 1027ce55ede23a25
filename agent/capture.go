package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/iptables"
)

// A CaptureConfig says which queries are redirected to the agent.
type CaptureConfig struct {
	// Config is what is captured. If ResolvConf is set, its Servers are those of that
	// file.
	Config iptables.Config
	// ResolvConf is a resolv.conf of which only the nameservers' queries are captured;
	// empty means as Config says. Changes are followed.
	ResolvConf string
	// Switch reads whether to capture at all. It is called four times a second. After an
	// error the previous value holds.
	Switch func() (Switch, error)
}

// A Switch says whether DNS is to be captured.
type Switch struct {
	On      bool
	Because string // what sets it
}

// switchInterval is how often the switch is read.
const switchInterval = 250 * time.Millisecond

// A capture makes one desired value of the switch, the nameservers of resolv.conf and the
// listeners that answer, and has iptables keep the kernel so.
type capture struct {
	config CaptureConfig
	log    *slog.Logger
	proxy  *dnsproxy.Server
	kernel *iptables.Capture
	file   *resolvconf.Config // as read at the start; nil if it has no nameservers yet

	mu     sync.Mutex
	inputs inputs // guarded by mu
}

// newCapture checks the configuration.
func newCapture(cfg CaptureConfig, proxy *dnsproxy.Server, log *slog.Logger) (*capture, error) {
	c := &capture{config: cfg, log: log, proxy: proxy}
	initial := cfg.Config
	if cfg.ResolvConf != "" {
		file, err := readServers(cfg.ResolvConf)
		if err != nil {
			log.Warn("nothing is captured until there are nameservers", "error", err)
		} else {
			c.file, c.inputs.servers = file, addrs(file)
			initial.Servers = c.inputs.servers
		}
	}
	var err error
	if c.kernel, err = iptables.New(initial, log); err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return c, nil
}

// run keeps the capture as desired until ctx ends, and removes its rules then. If it is
// wanted at first and cannot be had, that is an error; later failures are logged and
// retried.
func (c *capture) run(ctx context.Context) error {
	if err := c.begin(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	var followers sync.WaitGroup
	followers.Go(func() { c.followSwitch(ctx) })
	followers.Go(func() { c.followListeners(ctx) })
	if c.config.ResolvConf != "" {
		followers.Go(func() { c.followServers(ctx) })
	}
	err := c.kernel.Keep(ctx)
	stop()
	followers.Wait()
	return err
}

// begin waits for the listeners, before which rules would take DNS away, and sets the
// first desired value.
func (c *capture) begin(ctx context.Context) error {
	without := c.listening(ctx)
	to, err := c.config.Switch()
	if err != nil {
		return fmt.Errorf("capturing DNS: %w", err)
	}
	err = c.change(func(in *inputs) { in.Switch, in.without = to, without })
	if err != nil && !errors.Is(err, errNoServers) && ctx.Err() == nil {
		return fmt.Errorf("capturing DNS: %w", err)
	}
	for f, reason := range without {
		c.sayLeftOut(f, reason)
	}
	return nil
}

// change changes what the desired value is made of, and sets that. It returns an error if
// that cannot be, so that all stays as it is.
func (c *capture) change(change func(in *inputs)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.inputs)
	d, err := c.inputs.desired(c.config)
	if err != nil {
		return err
	}
	return c.kernel.Set(d)
}

// current returns what the desired value is made of now.
func (c *capture) current() inputs {
	c.mu.Lock()
	defer c.mu.Unlock()
	in := c.inputs
	in.without = maps.Clone(in.without)
	return in
}

// followSwitch follows the switch until ctx ends. A change must read the same twice: a
// file that is written in place is empty for a moment, which says on.
func (c *capture) followSwitch(ctx context.Context) {
	ticker := time.NewTicker(switchInterval)
	defer ticker.Stop()
	var said string
	for last := c.current().Switch; ; {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		to, err := c.config.Switch()
		if err == nil && to == last {
			err = c.change(func(in *inputs) { in.Switch = to })
		}
		last = to
		said = c.say(err, said)
	}
}

// say logs an error unless it was logged before, and returns what was logged.
func (c *capture) say(err error, said string) string {
	if err == nil || errors.Is(err, errNoServers) {
		return ""
	}
	if err.Error() != said {
		c.log.Error("capture stays as it is", "error", err)
	}
	return err.Error()
}
