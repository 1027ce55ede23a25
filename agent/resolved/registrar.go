package resolved

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// A State is the state of a registration.
type State string

// The states.
const (
	Absent     State = "absent"     // this host does not run systemd-resolved
	Off        State = "off"        // the agent is not registered, and should not be
	Registered State = "registered" // the agent is registered
	Failed     State = "failed"     // the last attempt to register has failed
)

// A Status is the state of a registration.
type Status struct {
	State   State  `json:"state"`
	Domains int    `json:"domains"`         // number of registered domains
	Error   string `json:"error,omitempty"` // why the state is Failed
}

// A Config configures a [Registrar].
type Config struct {
	// Enabled returns whether the agent should be registered. Like Server and Domains, it is called at each check.
	Enabled func() bool
	// Server returns the address of the agent's listener, or an invalid address if no listener
	// can be registered.
	Server func() netip.AddrPort
	// Domains returns the domains to register, in lower case and without a trailing dot.
	Domains func() []string
	// Returned is called before domains are registered. From then on, systemd-resolved may send queries for names below
	// these domains to the agent. After the registration is removed, Returned is called without domains.
	Returned func(domains []string)
	// Interval is how often the registration is checked.
	Interval time.Duration
	// Logger is the log.
	Logger *slog.Logger

	// Only tests set these fields; zero values mean the defaults.
	Dir, Helper string
}

// A Registrar keeps the agent registered with systemd-resolved. On hosts without systemd-resolved it does nothing, and
// does not connect to D-Bus.
type Registrar struct {
	config   Config
	returned []string // the domains of the last call of Config.Returned; belongs to the goroutine of Run

	mu     sync.Mutex
	status Status // guarded by mu
}

const (
	// defaultDir exists if systemd-resolved has run since the host was booted.
	defaultDir = "/run/systemd/resolve"
	// checkTime is how long a check, or the helper, may take.
	checkTime = 10 * time.Second
	// noticeTime is how long systemd-resolved may take to notice a new interface.
	// systemd-resolved is asked every noticePause.
	noticeTime, noticePause = 3 * time.Second, 20 * time.Millisecond
)

// New returns a Registrar, which does nothing before Run.
func New(cfg Config) *Registrar {
	cfg.Dir, cfg.Helper = cmp.Or(cfg.Dir, defaultDir), cmp.Or(cfg.Helper, defaultHelper)
	return &Registrar{config: cfg, status: Status{State: Off}}
}

// Status returns the state of the registration.
func (r *Registrar) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.status
}

// Run keeps the agent registered until ctx ends. Run leaves the registration in place; [Registrar.Remove]
// removes it.
func (r *Registrar) Run(ctx context.Context) {
	for more := true; more; more = clock.Sleep(ctx, r.config.Interval) {
		status, err := r.check(ctx)
		if ctx.Err() == nil {
			r.report(status, err)
		}
	}
}

// Remove removes the registration. From then on, queries of systemd-resolved go to its other nameservers.
func (r *Registrar) Remove() error {
	err := RemoveLink()
	if err == nil && len(r.returned) > 0 {
		r.setReturned(nil)
		r.config.Logger.Info("no longer registered with systemd-resolved")
	}
	return err
}

// setReturned tells the agent the domains for which systemd-resolved may query it.
func (r *Registrar) setReturned(domains []string) {
	if !slices.Equal(r.returned, domains) {
		r.config.Returned(domains)
		r.returned = domains
	}
}

// check takes one step from the current state to the desired state.
func (r *Registrar) check(ctx context.Context) (Status, error) {
	if !r.config.Enabled() {
		return Status{State: Off}, r.Remove()
	}
	if _, err := os.Stat(r.config.Dir); err != nil {
		return Status{State: Absent}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	b, err := dialBus(ctx)
	if err != nil {
		return Status{}, err
	}
	defer b.close()
	switch running, err := b.running(ctx); {
	case err != nil:
		return Status{}, err
	case !running: // when systemd-resolved starts, it reads the saved settings of the interface
		return Status{State: Absent}, nil
	}
	return r.register(ctx, b)
}

// register makes the registration, unless systemd-resolved already has it.
func (r *Registrar) register(ctx context.Context, b bus) (Status, error) {
	server := r.config.Server()
	if !server.IsValid() {
		return Status{}, errors.New("the agent listens on no address that systemd-resolved could query")
	}
	index, created, err := makeLink()
	if err != nil {
		return Status{}, err
	}
	wanted := Registration{Link: index, Server: server, Domains: r.config.Domains()}
	registered, err := b.registered(ctx, wanted)
	for start := time.Now(); created && errors.Is(err, errUnknownLink) && time.Since(start) < noticeTime; {
		clock.Sleep(ctx, noticePause)
		registered, err = b.registered(ctx, wanted)
	}
	if err != nil {
		return Status{}, err
	}
	r.setReturned(wanted.Domains)
	if !registered {
		if err := r.apply(ctx, b, wanted); err != nil {
			return Status{}, err
		}
		if registered, err = b.registered(ctx, wanted); err == nil && !registered {
			err = errors.New("another program changes the settings that systemd-resolved has for the interface " + LinkName)
		}
		if err == nil && r.Status().State == Registered {
			r.config.Logger.Warn("the registration with systemd-resolved was missing or different, and was made again")
		}
	}
	return Status{State: Registered, Domains: len(wanted.Domains)}, err
}

// apply makes a registration. If this process is not root and there is a helper, the helper makes it.
func (r *Registrar) apply(ctx context.Context, b bus, wanted Registration) error {
	if _, err := os.Stat(r.config.Helper); err == nil && os.Geteuid() != 0 {
		return askHelper(ctx, r.config.Helper, wanted)
	}
	return b.register(ctx, wanted)
}

// report publishes the status, and logs it if it has changed.
func (r *Registrar) report(status Status, err error) {
	if err != nil {
		status = Status{State: Failed, Error: err.Error()}
	}
	r.mu.Lock()
	changed := r.status != status
	r.status = status
	r.mu.Unlock()
	switch {
	case !changed:
	case status.State == Failed:
		r.config.Logger.Warn("programs that ask systemd-resolved may not find mesh names; retrying", "error", err)
	case status.State == Registered:
		r.config.Logger.Info("registered with systemd-resolved", "interface", LinkName, "domains", status.Domains)
	}
}
