package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Desired tells whether DNS is to be captured, and how.
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

// acceptable returns an error if no family is installed, or if anything is missing that this machine may
// support.
func (c Config) acceptable(in installed) error {
	var refused, passing []error
	for _, f := range families() {
		if err := in.missing[f]; err != nil {
			err = fmt.Errorf("capturing DNS over %s: %w", f, err)
			switch {
			case len(in.families) == 0:
				refused = append(refused, err)
			case !unsupported(in.missing[f]):
				passing = append(passing, err)
			}
		}
		if err := in.reduced[f]; err != nil && !unsupported(err) {
			passing = append(passing, fmt.Errorf("DNS over %s is captured without %s: %w",
				f, strings.Join(in.families[f].without, ", "), err))
		}
	}
	switch {
	case len(refused) > 0:
		return errors.Join(refused...)
	case len(passing) > 0:
		return fmt.Errorf("%w: %w", ErrIncomplete, errors.Join(passing...))
	}
	return nil
}

// A phase is what a Capture knows of the kernel.
type phase int

const (
	untouched phase = iota // no step was taken
	captured               // the rules of the goal are installed, as far as this machine supports them
	outdated               // other rules are installed, or may be
	unhooked               // nothing is captured; chains stay for replies in flight
	removed                // nothing of nametap is left
)

// A step is one thing to do.
type step int

const (
	stepNone   step = iota // nothing until the desired value changes
	stepWait               // nothing until a step is due
	stepApply              // install the rules
	stepCheck              // look for drift, and repair it
	stepUnhook             // end the capture; keep what replies in flight need
	stepRemove             // remove the rest
)

// next returns the next step from a phase to the desired value. due is true if the time for
// a step has come.
func next(desired *target, now phase, due bool) step {
	switch {
	case !desired.set, !desired.On && now == removed:
		return stepNone
	case !due:
		return stepWait
	case desired.On && now == captured:
		return stepCheck
	case desired.On:
		return stepApply
	case now == unhooked:
		return stepRemove
	}
	return stepUnhook
}

// Capture makes the kernel of its network namespace capture DNS as desired.
//
// Keep, Apply and Remove change rules; only one of them may run at a time. All other methods may
// be called at any time, and never wait for these.
type Capture struct {
	log *slog.Logger

	checks, repairs, failures atomic.Uint64
	drift                     atomic.Pointer[string]    // see Stats
	watched                   atomic.Bool               // the kernel announces changes of nft rules
	begins                    atomic.Bool               // a lease begins
	announced                 atomic.Pointer[time.Time] // the last change of nft rules, also of nametap

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
	unleased bool                     // the rules of a family had no lease
	changes  bool                     // rules were installed or changed since the last report
	placed   map[site]bool            // where rules were written and may still be
	made     map[site]map[string]bool // the tables that this process has made
	bare     map[Backend]bool         // the backends in which the last unhook has found nothing
	logged   string                   // the last failure that was logged
	entries  entries
	firewall firewall
	seed     maphash.Seed  // of fingerprints
	seen     fingerprint   // of the kernel when all rules were there, zero if that is not known
	ready    time.Time     // the earliest time of a check that an announcement makes due
	lacks    time.Duration // the pause before what this machine does not support is tried again; 0 if there is none
	lacksDue time.Time     // when that is
	paced    time.Time     // when the steps so far would have ended at one in each Config.Interval

	open      func() bool // reports connections to VIPs; nil if there are never any
	openSince time.Time   // when the chains were found to be in use first, after they were unhooked
	openLimit time.Duration
	openUntil time.Time // set at the end of Keep
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

// Renew makes the rules of a family match for [LeaseTime] from now on, if they have a lease, also
// the rules of an earlier agent. It is no error if there are no rules.
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

// Begun returns a channel that is closed when Keep has installed the rules of the first desired
// value, or has begun to remove rules if capture is off.
func (c *Capture) Begun() <-chan struct{} { return c.begun }

// Keep keeps the kernel as desired until ctx ends: it follows every change of the desired value,
// repairs drift within Config.Interval, and retries what fails. It takes over installed rules,
// and replaces rules that differ. At the end it removes the rules, unless Config.FailClosed is
// set or SetEnding says otherwise.
//
// If the first desired value is on and its rules cannot be installed, Keep leaves none and
// returns the error. It logs and counts later failures.
//
// A removal takes two steps. After the first, no query is captured. If queries were captured
// recently, the chains stay for Config.Settle, without jumps to them: when the last rule that
// needs it is deleted, the kernel stops tracking connections and translating addresses, and
// replies in flight would be lost. They also stay for open connections to VIPs ([Capture.SetOpen]). If capture is desired again during that time, one write
// completes the rules.
func (c *Capture) Keep(ctx context.Context) error {
	defer c.lease.close()
	watching, stop := context.WithCancel(ctx)
	var watcher sync.WaitGroup
	defer watcher.Wait()
	defer stop()
	if announced, err := watchRules(); err == nil {
		c.watched.Store(true)
		watcher.Go(func() {
			err := announced.forward(watching, func() {
				now := time.Now()
				c.announced.Store(&now)
				wake(c.rules)
			})
			if c.watched.Store(false); watching.Err() == nil {
				c.log.Warn("changes of rules are found by checks only", "error", err)
				wake(c.rules)
			}
		})
	}
	err := c.loop(ctx)
	c.openUntil = time.Now().Add(c.openLimit)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout+c.openLimit)
	defer cancel()
	return errors.Join(err, c.end(ctx))
}

// Apply installs the rules in place of any others of nametap, and removes rules in the other
// backend. It changes nothing if they are installed already. Each family has all of its rules
// or none.
//
// A family or zone that this machine does not support is left out, and logged. Any other
// failure is retried for about 2 s. After that the rules that work are installed, and Apply
// returns [ErrIncomplete]. After any other error the first Apply leaves no rules.
func (c *Capture) Apply(ctx context.Context) error { return c.once(ctx, true) }

// Remove removes all rules and chains of nametap, in both backends and families, whatever
// configuration they were made of. It leaves rules of other programs unchanged. It is no error
// if there are none.
//
// If a backend can never be read, for example without a capability, Remove does the rest and
// returns [ErrUnseen], unless the kernel reports the backend as empty. If c has installed
// rules there, that is a failure, and so is any backend that cannot be read now.
//
// Remove takes the same steps as Keep. When ctx ends it does not wait for replies in flight any
// longer. It retries for some seconds what fails for a reason that may pass.
func (c *Capture) Remove(ctx context.Context) error { return c.once(ctx, false) }

// once turns capture on or off, and returns when that is done or has failed.
func (c *Capture) once(ctx context.Context, on bool) error {
	d := c.target.Load().Desired
	d.On = on
	if err := c.Set(d); err != nil {
		return err
	}
	c.goal = c.target.Load()
	if c.phase == removed {
		c.phase = untouched // another process may have installed rules since
	}
	c.restart()
	return c.reach(ctx)
}

// endTimeout bounds the removal at the end of Keep: the settle time, and the time of the tools.
const endTimeout = 15 * time.Second

// end removes the rules at the end of Keep, unless they are to stay. It ignores the desired
// value, which may still change.
func (c *Capture) end(ctx context.Context) error {
	kept := c.goal.On && c.goal.Config.FailClosed
	ending := Ending(c.ending.Load())
	switch {
	case ending == Leave && c.goal.On && c.phase != unhooked:
		c.log.Info("the capture rules stay for the next agent")
		return nil
	case c.phase == removed, c.phase == untouched && (c.goal.On || !c.goal.set), kept && !c.captured:
		return nil
	case kept && c.phase != unhooked:
		c.log.Warn("the capture rules stay: queries wait for the next agent, or are refused; `nametap capture remove` removes them")
		return nil
	}
	off := *c.goal
	off.On, off.set = false, true
	if ending == Soon {
		off.Config.Settle = min(off.Config.Settle, soonSettle)
	}
	c.goal = &off
	c.restart()
	had := c.captured
	err := c.reach(ctx)
	if err != nil && !c.onlyOthers(err) {
		return fmt.Errorf("removing the capture rules (`nametap capture remove` does that too): %w", err)
	}
	if had {
		c.log.Info("capture rules removed")
	}
	return nil
}

// reach takes steps until the goal is reached or a step returns an error. restart was called
// before.
func (c *Capture) reach(ctx context.Context) error {
	for {
		switch s := c.next(); {
		case s == stepNone, c.phase == captured:
			return nil
		case s != stepWait:
			if err := c.act(ctx, s); err != nil {
				return err
			}
		default:
			c.sleep(ctx, s)
			if ctx.Err() == nil {
				continue
			}
			if c.retries.failure != nil {
				return c.retries.failure
			}
			c.due = time.Time{} // no longer wait for replies in flight
		}
	}
}

// loop is Keep without the end.
func (c *Capture) loop(ctx context.Context) error {
	begun := false
	for ctx.Err() == nil {
		c.take()
		s := c.next()
		if s != stepApply && !begun {
			begun = true
			close(c.begun)
		}
		if s == stepNone || s == stepWait {
			c.sleep(ctx, s)
			continue
		}
		// The goal may change because a firewall is changing rules, so that queries pass through.
		if changed := c.lastChange(); s == stepApply && c.in.backend != "" && (len(c.firewall.lacks) > 0 || time.Since(changed) < firewallPause) {
			c.firewall.look(changed)
		}
		had := c.captured
		err := c.act(ctx, s)
		switch {
		case ctx.Err() != nil:
		case !begun && err != nil && !errors.Is(err, ErrIncomplete):
			return fmt.Errorf("capturing DNS: %w", err)
		case s == stepUnhook || s == stepRemove:
			c.logRemoval(had, err)
		default:
			c.logFailure(err)
		}
	}
	return nil
}

// take makes the desired value the goal.
func (c *Capture) take() {
	previous := c.goal
	c.goal = c.target.Load()
	if c.goal == previous {
		return
	}
	defer c.publish()
	if previous == nil || c.goal.same(previous) {
		return
	}
	if !c.goal.On && (previous.On || !previous.set) {
		c.log.Info("DNS capture is off", "because", c.goal.Because)
	}
	c.restart()
}

// restart lets the next step begin at once, from what is in the kernel.
func (c *Capture) restart() {
	if c.phase == captured {
		c.phase = outdated
	}
	if c.phase != unhooked || c.goal.On || c.retries.failure != nil {
		c.due = time.Time{} // in the other case replies are in flight
	}
	c.attempts, c.logged, c.lacks = patient, "", 0
	c.firewall.spared = nil
	c.retries.failure, c.retries.n = nil, 0
}

// next returns the next step now.
func (c *Capture) next() step { return next(c.goal, c.phase, !time.Now().Before(c.due)) }

// sleep returns when the desired value changed, the next step is due, or ctx ends.
func (c *Capture) sleep(ctx context.Context, s step) {
	timer := time.NewTimer(time.Until(c.due))
	defer timer.Stop()
	due := timer.C
	if s == stepNone {
		due = nil
	}
	select {
	case <-ctx.Done():
	case <-c.changed:
	case <-c.rules:
		if c.phase == captured && c.ready.Before(c.due) {
			c.due = c.ready
		}
	case <-due:
	}
}

// act takes one step. The error of a removal that is retried soon is nil.
func (c *Capture) act(ctx context.Context, s step) error {
	defer c.publish()
	began := time.Now()
	switch s {
	case stepApply:
		m := c.goal.Config.toolbox().inspectAll(ctx)
		changed, err := c.apply(ctx, m, c.attempts)
		c.firewall.note(m, c.in)
		c.applied = m
		c.due, c.attempts = c.nextCheck(began), brief
		if err == nil || errors.Is(err, ErrIncomplete) {
			c.phase, c.captured = captured, true
			c.settle, c.retries = 0, retries{}
		} else {
			c.phase, c.captured = outdated, c.captured && c.in.backend != ""
		}
		c.logCaptured(changed, err)
		return withoutCapability(err)
	case stepCheck:
		err := c.check(ctx)
		c.due = c.nextCheck(began)
		return err
	case stepUnhook:
		return c.unhookAll(ctx)
	case stepRemove:
		if ctx.Err() == nil && c.inUse() {
			if c.openSince.IsZero() {
				c.openSince = began
			}
			c.due = began.Add(min(max(began.Sub(c.openSince)/8, openShortest), openLongest))
			return nil
		}
		return c.removeAll(ctx)
	}
	return nil
}

// lastChange returns when the kernel has announced a change of nft rules last.
func (c *Capture) lastChange() (at time.Time) {
	if announced := c.announced.Load(); announced != nil {
		at = *announced
	}
	return at
}

// nextCheck returns when to check the rules after a step that has just ended, if no program changes them
// before. On a machine where steps take longer than Config.Interval, half of the time is left to other
// programs. An announcement makes a check due at c.ready.
func (c *Capture) nextCheck(began time.Time) time.Time {
	took := time.Since(began)
	interval := c.goal.Config.Interval
	if longest := began.Add(-checksAtOnce * interval); c.paced.Before(longest) {
		c.paced = longest
	}
	c.paced = c.paced.Add(interval)
	c.ready = began.Add(2 * took)
	if c.ready.Before(c.paced) {
		c.ready = c.paced
	}
	if len(c.firewall.lacks) > 0 {
		return began.Add(max(firewallPause, 2*took))
	}
	if c.watched.Load() && c.in.backend == NFT && c.in.complete() && !c.entries.pending() {
		return began.Add(quietInterval)
	}
	return began.Add(max(interval, 2*took))
}

// checksAtOnce is how many checks may follow announcements at once. Programs that change nft rules all the time,
// or want other rules than nametap, then get one check in each Config.Interval.
const checksAtOnce = 10

// quietInterval is the time between checks of complete rules in nft, whose changes the kernel announces.
const quietInterval = time.Hour

// logCaptured logs that rules were installed or replaced.
func (c *Capture) logCaptured(changed bool, err error) {
	if changed && err == nil {
		c.log.Info("DNS is captured", "port", c.goal.Config.Port, "backend", c.in.backend, "because", c.in.reason)
	}
}

// logFailure counts a failure of a check, a repair or a retry, and logs it unless it is the same
// as the previous one.
func (c *Capture) logFailure(err error) {
	if err == nil {
		c.logged = ""
		return
	}
	c.failures.Add(1)
	text := err.Error()
	if text == c.logged {
		return
	}
	c.logged = text
	if errors.Is(err, ErrIncomplete) {
		c.log.Error("capture is incomplete; retrying", "error", err)
		return
	}
	c.log.Error("the capture rules cannot be checked or repaired; retrying", "error", err)
}
