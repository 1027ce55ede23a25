package resolved

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
)

// A Config configures a [Registrar].
type Config struct {
	// Server returns the address of the agent's listener, or an invalid address if no listener
	// can be registered.
	Server func() netip.AddrPort
	// Names returns the names to register. It is called after [Registrar.Note], at most
	// once in notePause.
	Names func() Names
	// Returned is called before domains are registered. From then on, systemd-resolved may send queries for names below
	// these domains to the agent. After the registration is removed, Returned is called without domains.
	Returned func(domains []string)
	// Interval is how often the registration is checked.
	Interval time.Duration
	// Logger is the log.
	Logger *slog.Logger

	// Only tests set these fields; zero values mean the defaults.
	Dir, Helper string
	Pause       time.Duration
}

// Names are the names that are registered.
type Names struct {
	// Required are domains that are registered before all others.
	Required []string
	// Domains are the domains of all other names. They are registered as long as there is room.
	Domains []string
	// Fingerprint changes when the names change. The registrar then flushes the caches of
	// systemd-resolved. Fingerprint is 0 if the agent has no table yet.
	Fingerprint uint64
}

// notePause is the least time between two readings of the names, and so between two flushes of the caches. A control
// plane may push every second, and a flush makes systemd-resolved query for all names again.
const notePause = 5 * time.Second

// A Registrar keeps the agent registered with systemd-resolved. On hosts without systemd-resolved it does nothing, and
// does not connect to D-Bus.
type Registrar struct {
	config  Config
	stale   atomic.Bool   // whether the names may have changed since they were read
	wake    chan struct{} // wakes Run after Note and Set
	enabled atomic.Bool
	repairs atomic.Uint64

	mu     sync.Mutex
	status Status // guarded by mu

	// The fields below belong to the goroutine of Run.
	bus        *bus // nil: not connected
	names      Names
	read       time.Time    // when names were read
	chosen     []string     // the domains to register, chosen from names
	others     int          // number of domains beyond the limit
	registered Registration // the last registration; its Link is 0 if there is none
	flushed    uint64       // the fingerprint of the names when the caches were last flushed
	elsewhere  bool         // whether systemd-resolved runs in another network namespace
}

// New returns a Registrar. It is off.
func New(cfg Config) *Registrar {
	cfg.Dir, cfg.Helper = cmp.Or(cfg.Dir, defaultDir), cmp.Or(cfg.Helper, defaultHelper)
	cfg.Pause = cmp.Or(cfg.Pause, notePause)
	r := &Registrar{config: cfg, wake: make(chan struct{}, 1), status: Status{State: Off}}
	r.stale.Store(true)
	chans.Wake(r.wake) // for the first check
	return r
}

// Set sets whether the agent should be registered.
func (r *Registrar) Set(enabled bool) {
	if r.enabled.Swap(enabled) != enabled {
		chans.Wake(r.wake)
	}
}

// Note makes Run read the names again, because they may have changed. It does not block.
func (r *Registrar) Note() {
	if !r.stale.Swap(true) {
		chans.Wake(r.wake)
	}
}

// Status returns the state of the registration.
func (r *Registrar) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	status := r.status
	status.Repairs = r.repairs.Load()
	return status
}

// Run keeps the agent registered until ctx ends. Run leaves the registration in place; [Registrar.Remove]
// removes it.
func (r *Registrar) Run(ctx context.Context) {
	defer r.disconnect()
	timer := time.NewTimer(r.config.Interval)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case _, connected := <-r.changes():
			if !connected {
				r.disconnect()
			}
		case <-timer.C:
		}
		status, err := r.sync(ctx)
		if ctx.Err() != nil {
			return
		}
		r.report(status, err)
		timer.Reset(r.due())
	}
}

// due returns how long to wait before the next check: usually Interval. If the names may have changed, but must not be
// read yet because of notePause, the wait ends when they may be read.
func (r *Registrar) due() time.Duration {
	if left := r.pauseLeft(); r.stale.Load() && left > 0 {
		return min(r.config.Interval, left)
	}
	return r.config.Interval
}

// pauseLeft returns how long to wait before the names may be read again. It returns 0 if the names were read before
// the agent had a table: the names of its first table are registered at once.
func (r *Registrar) pauseLeft() time.Duration {
	if r.read.IsZero() || r.names.Fingerprint == 0 {
		return 0
	}
	return r.config.Pause - time.Since(r.read)
}

// changes returns the channel that gets a signal when systemd-resolved starts or ends. The channel is closed
// when D-Bus ends. It is nil without a connection.
func (r *Registrar) changes() <-chan *dbus.Signal {
	if r.bus == nil {
		return nil
	}
	return r.bus.changes
}

// Remove removes the registration. From then on, queries of systemd-resolved go to its other nameservers.
func (r *Registrar) Remove(ctx context.Context) error {
	err := RemoveLink()
	if r.registered.Link != 0 && err == nil {
		r.config.Logger.Info("no longer registered with systemd-resolved")
		r.flushOnce(ctx)
	}
	r.registered, r.read = Registration{}, time.Time{}
	r.stale.Store(true) // for the next registration
	if err == nil {
		r.config.Returned(nil)
	}
	return err
}

// flushOnce flushes the caches of systemd-resolved over a connection of its own.
func (r *Registrar) flushOnce(ctx context.Context) {
	const timeout = 200 * time.Millisecond // the agent is ending
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	b, err := dialBus(ctx)
	if err == nil {
		err = b.flush(ctx)
		b.close()
	}
	if err != nil {
		r.config.Logger.Debug("the caches of systemd-resolved cannot be flushed; mesh names stay there for up to --ttl", "error", err)
	}
}

// sync takes one step from the current state to the desired state.
func (r *Registrar) sync(ctx context.Context) (Status, error) {
	if !r.enabled.Load() {
		r.disconnect()
		return Status{State: Off}, r.Remove(ctx)
	}
	if !exists(r.config.Dir) {
		r.disconnect()
		return Status{State: Absent}, nil
	}
	if err := r.connect(ctx); err != nil {
		return Status{}, err
	}
	running, err := r.bus.running(ctx)
	if err != nil {
		r.disconnect()
		return Status{}, err
	}
	if !running { // when systemd-resolved starts, it reads the saved settings of the interface
		return Status{State: Absent}, nil
	}
	return r.update(ctx)
}

// update makes the registration if it is missing or has changed.
func (r *Registrar) update(ctx context.Context) (Status, error) {
	address := r.config.Server()
	if !address.IsValid() {
		return Status{}, errors.New("the agent listens on no address that systemd-resolved could query")
	}
	r.readNames()
	if r.elsewhere {
		return Status{}, errUnknownLink
	}
	index, err := makeLink()
	if err != nil {
		return Status{}, err
	}
	wanted := Registration{Link: index, Server: address, Domains: r.chosen}
	if err := r.compare(ctx, wanted); err != nil {
		return Status{}, err
	}
	status := Status{State: Registered, Domains: len(r.chosen), Others: r.others}
	if r.flushed != r.names.Fingerprint {
		if err := r.bus.flush(ctx); err != nil {
			return status, err
		}
		r.flushed = r.names.Fingerprint
	}
	return status, nil
}

// readNames reads the names, if they may have changed and were not read within the last notePause.
func (r *Registrar) readNames() {
	if !r.stale.Load() || r.pauseLeft() > 0 {
		return
	}
	r.stale.Store(false)
	r.read, r.names = time.Now(), r.config.Names()
	r.chosen, r.others = choose(r.names.Required, r.names.Domains)
	r.config.Returned(r.chosen)
}

// noticeTime is how long systemd-resolved may take to notice a new interface.
const noticeTime = 3 * time.Second

// compare makes the registration, unless systemd-resolved already has it.
func (r *Registrar) compare(ctx context.Context, wanted Registration) error {
	l, err := r.await(ctx, wanted.Link)
	switch {
	case errors.Is(err, errUnknownLink):
		r.elsewhere = true
		return errors.Join(err, RemoveLink())
	case err != nil:
		return err
	case l.matches(wanted) && l.inUse:
		r.registered = wanted
		return nil
	}
	before := r.registered
	if err := r.apply(ctx, wanted); err != nil {
		return err
	}
	if l, err = r.await(ctx, wanted.Link); err != nil {
		return err
	}
	if !l.matches(wanted) {
		return errors.New("another program changes the settings that systemd-resolved has for the interface " + LinkName)
	}
	r.registered, r.flushed = wanted, 0
	if before.Link != 0 && !changed(before, wanted) {
		r.repairs.Add(1)
		r.config.Logger.Warn("the registration with systemd-resolved had changed and was repaired")
	}
	return nil
}

// changed reports whether two registrations differ in the server or in the domains.
func changed(a, b Registration) bool {
	return a.Server != b.Server || !sameDomains(wanted(a.Domains), wanted(b.Domains))
}

// await waits until systemd-resolved sees the interface with the given index, and returns the settings that
// systemd-resolved has for it.
func (r *Registrar) await(ctx context.Context, index int) (link, error) {
	const pause = 20 * time.Millisecond
	for start := time.Now(); ; {
		l, err := r.bus.link(ctx, index)
		if !errors.Is(err, errUnknownLink) || time.Since(start) > noticeTime {
			return l, err
		}
		if !clock.Sleep(ctx, pause) {
			return link{}, ctx.Err()
		}
	}
}

// apply makes a registration. If this process is not root and there is a helper, the helper makes it.
func (r *Registrar) apply(ctx context.Context, wanted Registration) error {
	if os.Geteuid() != 0 && exists(r.config.Helper) {
		return askHelper(ctx, r.config.Helper, wanted)
	}
	return r.bus.register(ctx, wanted)
}

// connect connects to D-Bus, unless there is a connection.
func (r *Registrar) connect(ctx context.Context) error {
	if r.bus != nil && r.bus.conn.Connected() {
		return nil
	}
	r.disconnect()
	var err error
	r.bus, err = dialBus(ctx)
	r.elsewhere = false
	return err
}

// disconnect closes the connection to D-Bus.
func (r *Registrar) disconnect() {
	if r.bus != nil {
		r.bus.close()
		r.bus = nil
	}
}

// report publishes the status, and logs it if it has changed.
func (r *Registrar) report(status Status, err error) {
	if err != nil {
		status.State, status.Error = Failed, err.Error()
	}
	r.mu.Lock()
	previous := r.status
	r.status = status
	r.mu.Unlock()
	if status == previous {
		return
	}
	switch {
	case status.Error != "":
		r.config.Logger.Warn("programs that ask systemd-resolved may not find mesh names; retrying", "error", err)
	case status.State == Registered && status.Others > 0:
		r.config.Logger.Warn("registered with systemd-resolved, which accepts no more domains: names of the other domains are found only if queries of systemd-resolved are captured",
			"interface", LinkName, "domains", status.Domains, "others", status.Others)
	case status.State == Registered:
		r.config.Logger.Info("registered with systemd-resolved", "interface", LinkName, "domains", status.Domains)
	}
}
