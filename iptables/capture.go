package iptables

import (
	"hash/maphash"
	"log/slog"
	"reflect"
	"slices"
	"sync/atomic"
	"time"
)

// Desired says whether DNS is to be captured, and how.
type Desired struct {
	On bool
	// Because says what decides that, for the log.
	Because string
	// Config says what is captured. A removal needs its Settle.
	Config Config
}

// A target is a desired value with the variants of its rules, best first. It never changes.
type target struct {
	Desired
	set      bool // false before the first Set: there is nothing to do
	variants []variant
	leased   []variant // the same with a lease, in which another process may have installed them
}

// same reports whether t asks for the same rules as other.
func (t *target) same(other *target) bool {
	return t.set == other.set && t.On == other.On && reflect.DeepEqual(t.Config, other.Config)
}

// Capture makes the kernel of its network namespace capture DNS as desired.
//
// Keep, Apply and Remove change rules; only one of them may run at a time. All other methods may
// be called at any time, and never wait for these.
type Capture struct {
	log *slog.Logger

	checks, repairs, failures atomic.Uint64
	watched                   atomic.Bool // the kernel announces changes of nft rules
	begins                    atomic.Bool // a lease begins

	target    atomic.Pointer[target] // the desired value
	changed   chan struct{}          // receives when target changed
	rules     chan struct{}          // receives when a program has changed nft rules, or a lease begins
	installed chan struct{}          // see Installed
	begun     chan struct{}          // see Begun
	ending    atomic.Int32           // an Ending
	report    atomic.Pointer[report] // what other goroutines read
	lease     lease

	// The rest belongs to the goroutine that changes rules.

	goal     *target                  // the target that the steps are for
	phase    phase                    // what is known of the kernel
	due      time.Time                // the earliest time of the next step
	attempts int                      // to write the rules of goal
	settle   time.Duration            // for which the chains stay after they are unhooked
	retries  retries                  // of a removal
	in       installed                // what this process has installed
	applied  machine                  // what the last step apply has left
	captured bool                     // rules were installed and not removed
	unleased bool                     // those of a family had no lease
	changes  bool                     // rules were installed or changed since the last report
	placed   map[site]bool            // where rules were written and may still be
	made     map[site]map[string]bool // the tables that this process has made
	bare     map[Backend]bool         // the backends in which the last unhook has found nothing
	logged   string                   // the last failure that was logged
	entries  entries
	seed     maphash.Seed // of fingerprints
	seen     fingerprint  // of the kernel when all rules were there, zero if that is not known
	ready    time.Time    // the earliest time of a check that an announcement makes due

	open      func() bool // reports connections to VIPs; nil if there are never any
	openSince time.Time   // when the chains were found to be in use first, after they were unhooked
	openLimit time.Duration
	openUntil time.Time // set at the end of Keep
}

// variantsFor returns the variants of the rules of a family, best first. If the kernel has rules with a lease,
// and the configuration neither wants one nor rules that stay, an agent keeps them, so they have the lease.
func (t *target) variantsFor(f Family, have saved) []variant {
	if have.leased(f) && !t.Config.FailClosed {
		return t.leased
	}
	return t.variants
}

// A site is where rules of one family are.
type site struct {
	backend Backend
	family  Family
}

// installed is what this process put into the kernel.
type installed struct {
	backend  Backend
	reason   string // why this backend
	families map[Family]variant
	missing  map[Family]error // why families that are wanted are not installed
	reduced  map[Family]error // why installed families do not have the best variant
}

// complete reports whether everything is installed that the configuration asks for.
func (in installed) complete() bool {
	return in.backend != "" && len(in.missing)+len(in.reduced) == 0
}

// unleased reports whether the rules of a family capture without an agent.
func (in installed) unleased() bool {
	for _, v := range in.families {
		if !v.lease {
			return true
		}
	}
	return false
}

// New returns a Capture that has done nothing yet. A nil logger logs nothing.
func New(cfg Config, log *slog.Logger) (*Capture, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Capture{
		log:       log,
		changed:   make(chan struct{}, 1),
		rules:     make(chan struct{}, 1),
		installed: make(chan struct{}, 1),
		begun:     make(chan struct{}),
		placed:    make(map[site]bool),
		made:      make(map[site]map[string]bool),
		bare:      make(map[Backend]bool),
		entries:   newEntries(log),
		seed:      maphash.MakeSeed(),
	}
	c.target.Store(&target{})
	if err := c.aim(&target{Desired: Desired{Config: cfg}}); err != nil {
		return nil, err
	}
	c.take()
	return c, nil
}

// Set changes the desired value. It returns an error, and changes nothing, if the
// configuration is not valid; otherwise Keep follows.
func (c *Capture) Set(d Desired) error { return c.aim(&target{Desired: d, set: true}) }

// aim completes a target and makes it the current one.
func (c *Capture) aim(t *target) error {
	t.Config = t.Config.withDefaults()
	previous := c.target.Load()
	if t.same(previous) && t.Because == previous.Because {
		return nil
	}
	var err error
	if t.variants, err = variants(t.Config); err != nil {
		return err
	}
	leased := t.Config
	leased.Lease, leased.FailClosed = true, false
	if t.leased, err = variants(leased); err != nil {
		return err
	}
	if !slices.Equal(t.Config.Servers, previous.Config.Servers) {
		for _, server := range t.Config.Servers {
			if Passes(server) {
				c.log.Warn("queries to a link-local nameserver are not captured: the kernel cannot redirect them", "server", server)
			}
		}
	}
	c.target.Store(t)
	wake(c.changed)
	return nil
}

// An Ending says what Keep does with the rules at its end.
type Ending int32

const (
	// Settle removes the rules, and waits for replies in flight: the zero value.
	Settle Ending = iota
	// Soon removes the rules, and waits only soonSettle for replies in flight.
	Soon
	// Leave leaves the rules to another process.
	Leave
)

// soonSettle is the settle time of Soon. Nameservers that are near have replied by then.
const soonSettle = 100 * time.Millisecond

// SetEnding sets what Keep does at its end. Rules that Config.FailClosed keeps stay in any case.
func (c *Capture) SetEnding(e Ending) { c.ending.Store(int32(e)) }

// SetOpen makes a removal keep the chains, without jumps to them, also while open reports that there are
// connections to VIPs: the kernel translates their addresses as long as a rule needs it. At the end of
// Keep they stay for up to limit. It must be called before Keep.
func (c *Capture) SetOpen(open func() bool, limit time.Duration) { c.open, c.openLimit = open, limit }

// The pauses between two looks for open connections: an eighth of the time that they are open already.
const openShortest, openLongest = 50 * time.Millisecond, 10 * time.Second

// inUse reports whether the chains stay for open connections.
func (c *Capture) inUse() bool {
	return c.open != nil && (c.openUntil.IsZero() || time.Now().Before(c.openUntil)) && c.open()
}

// Renew makes the rules of a family match for [LeaseTime] from now on, if they have a lease, also those of
// an earlier agent. It is no error if there are no rules.
func (c *Capture) Renew(f Family) error {
	begins, err := c.lease.renew(f)
	if begins { // connections to VIPs that have begun before have no reply
		c.begins.Store(true)
		wake(c.rules)
	}
	return err
}

// Installed returns a channel that receives when rules were installed or changed. A value that waits stands for
// several.
func (c *Capture) Installed() <-chan struct{} { return c.installed }

// Active reports whether queries are captured: rules are installed, and match.
func (c *Capture) Active() bool {
	r := c.report.Load()
	active := len(r.in.families) == 0 && !r.outdated // no nameserver can be captured
	for f, v := range r.in.families {
		active = active || !v.lease || c.lease.alive(f)
	}
	return r.captured && (active || r.unleased && r.outdated) // a removal may have failed
}

// Leased reports whether the rules that are installed have a lease: the kernel ends the capture when no
// agent renews it.
func (c *Capture) Leased() bool {
	in := c.report.Load().in
	for _, v := range in.families {
		if !v.lease {
			return false
		}
	}
	return len(in.families) > 0
}

// Stats counts what Keep has done.
type Stats struct {
	Checks   uint64 // checks of the rules
	Repairs  uint64 // drifts that were repaired
	Failures uint64 // checks, repairs and retries that failed
}

// Stats returns the counts so far.
func (c *Capture) Stats() Stats {
	return Stats{Checks: c.checks.Load(), Repairs: c.repairs.Load(), Failures: c.failures.Load()}
}

// Begun returns a channel that is closed when Keep has installed the rules of the first desired
// value, or has begun to remove rules if capture is off.
func (c *Capture) Begun() <-chan struct{} { return c.begun }

// A report is the state of a Capture for other goroutines. It never changes.
type report struct {
	goal      *target
	in        installed
	outdated  bool // what is installed is not of goal
	unleased  bool // rules were installed that capture without an agent
	captured  bool
	remaining string
	levels    map[Family]Level
}

// publish makes the state visible to other goroutines.
func (c *Capture) publish() {
	r := &report{goal: c.goal, in: c.in, outdated: c.phase != captured, unleased: c.unleased, captured: c.captured, levels: make(map[Family]Level)}
	if c.retries.reported != nil {
		r.remaining = c.retries.reported.Error()
	}
	for _, f := range families() {
		r.levels[f] = c.level(f)
	}
	c.report.Store(r)
	if c.changes {
		c.changes = false
		wake(c.installed)
	}
}

// level returns the level of a family.
func (c *Capture) level(f Family) Level {
	v, ok := c.in.families[f]
	switch {
	case !c.goal.On || len(c.goal.variants[0].rules.tables(f)) == 0:
		return LevelOff
	case !ok && unsupported(c.in.missing[f]):
		return LevelUnavailable
	case !ok:
		return LevelFailed
	}
	return v.level()
}

// Levels returns how much of each family is captured, as the last step left it. It does not
// read the kernel.
func (c *Capture) Levels() map[Family]Level { return c.report.Load().levels }

// Missing reports whether the last attempt to install the rules of a family has failed.
func (c *Capture) Missing(f Family) bool { return c.report.Load().in.missing[f] != nil }

// Captured reports whether rules were installed and not removed since.
func (c *Capture) Captured() bool { return c.report.Load().captured }

// Remaining says why rules that are to be removed are or may be still there. It is "" if no
// removal has failed.
func (c *Capture) Remaining() string { return c.report.Load().remaining }
