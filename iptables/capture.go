package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/clock"
	"github.com/nametap/nametap/internal/family"
	"github.com/nametap/nametap/internal/logonce"
)

// Capture makes the kernel of its network namespace capture DNS as desired.
//
// Keep, Apply and Remove change rules; only one of them may run at a time. The other methods may be called at any
// time, unless they say otherwise, and never wait for these three.
type Capture struct {
	checks, repairs, failures atomic.Uint64
	drift                     atomic.Pointer[string] // see Stats
	watch                     watch
	leaseBegan                atomic.Bool // a lease has begun since the last check

	target    atomic.Pointer[target] // the desired value
	changed   chan struct{}          // receives when target changed
	rules     chan struct{}          // receives when a program has changed nft rules, or a lease begins
	installed chan struct{}          // see Installed
	begun     chan struct{}          // see Begun
	ending    atomic.Int32           // what Keep does at its end: an Ending
	report    atomic.Pointer[report] // the state that other goroutines read
	lease     lease

	// The rest belongs to the goroutine that changes rules.

	installer
	phase    phase         // what this process knows of the kernel
	due      time.Time     // the earliest time of the next step
	settle   time.Duration // how long the chains stay after they are unhooked
	tries    int           // how often the present step of a removal has failed
	failure  error         // its last failure; nil if the last step did not fail
	remains  error         // the failure of a removal that was reported last; nil after rules were removed or installed
	captured bool          // rules were installed and not removed
	logged   logonce.Failure
	read     time.Time // when a check last read the rules; zero if the rules may have changed since
	ready    time.Time // when a check is due if the kernel announces a change: see nextCheck
	paced    time.Time // bounds how often announcements cause checks: see nextCheck

	open      func() bool // reports whether there are connections to VIPs; nil if there can be none
	openLimit time.Duration
	openUntil time.Time // after this time, connections no longer keep the chains; zero until Keep ends
}

// New returns a Capture that has done nothing yet. A nil logger logs nothing.
func New(cfg Config, log *slog.Logger) (*Capture, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Capture{
		installer: newInstaller(log),
		changed:   make(chan struct{}, 1),
		rules:     make(chan struct{}, 1),
		installed: make(chan struct{}, 1),
		begun:     make(chan struct{}),
	}
	c.target.Store(&target{})
	if err := c.aim(&target{Desired: Desired{Config: cfg}}); err != nil {
		return nil, err
	}
	c.take()
	return c, nil
}

// Set changes the desired value. If the configuration is not valid, it changes nothing and returns an error.
// Otherwise Keep changes the kernel accordingly.
func (c *Capture) Set(d Desired) error { return c.aim(&target{Desired: d, set: true}) }

// aim sets the defaults and the variants of a target, and makes it the current target.
func (c *Capture) aim(t *target) error {
	t.Config = t.Config.withDefaults()
	previous := c.target.Load()
	if t.sameRules(previous) && t.Because == previous.Because {
		return nil
	}
	var err error
	if t.variants, err = variants(t.Config); err != nil {
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
	chans.Wake(c.changed)
	return nil
}

// SetEnding sets what Keep does at its end. Rules that Config.FailClosed keeps stay in any case.
func (c *Capture) SetEnding(e Ending) { c.ending.Store(int32(e)) }

// SetOpen makes a removal wait while connections to VIPs are open. The function open reports whether there are any.
// While they are open, the chains stay, without jumps to them, because the kernel translates the addresses of
// connections only as long as a rule needs that. At the end of Keep, the parameter limit is the longest time to
// wait. SetOpen must be called before Keep.
func (c *Capture) SetOpen(open func() bool, limit time.Duration) { c.open, c.openLimit = open, limit }

// Renew makes the rules of a family match for [LeaseTime] from now on, even if an earlier agent installed them. Without
// rules that have a lease, it does nothing.
func (c *Capture) Renew(f family.Family) error {
	restarted, err := c.lease.renew(f)
	if restarted { // a check looks for the rules, and drops the entries of what began without a lease
		c.leaseBegan.Store(true)
		chans.Wake(c.rules)
	}
	return err
}

// EndLease ends the lease of the rules of a family. left is true if there are rules with a lease.
func (c *Capture) EndLease(f family.Family) (left bool, err error) { return c.lease.end(f) }

// Installed returns a channel that receives a value after rules were installed or changed. A value that waits may
// stand for several changes.
func (c *Capture) Installed() <-chan struct{} { return c.installed }

// Look makes Keep check the rules soon, as if the kernel had announced a change. It is for a caller that has reason
// to believe that the rules are gone. Look returns at once.
func (c *Capture) Look() { chans.Wake(c.rules) }

// Begun returns a channel that is closed when Keep has installed the rules of the first desired
// value. If capture is off, the channel is closed when Keep begins to remove rules.
func (c *Capture) Begun() <-chan struct{} { return c.begun }

// Keep keeps the kernel as desired until ctx ends: it follows every change of the desired value,
// repairs rules that other programs have changed, and retries what fails. If rules of nametap
// are installed already, Keep takes them over, and replaces those that differ. At the end it
// removes the rules, unless Config.FailClosed is set or SetEnding says otherwise.
//
// If the first desired value is on and its rules cannot be installed, Keep ends and returns the error. It logs and
// counts later failures.
//
// A removal takes two steps. After the first step, no query is captured. If queries were captured recently, the
// chains stay for Config.Settle, without jumps to them. Without these chains, the kernel would stop tracking
// connections and translating addresses, and replies in flight would be lost. The chains also stay for open
// connections to VIPs ([Capture.SetOpen]).
func (c *Capture) Keep(ctx context.Context) error {
	watching, stop := context.WithCancel(ctx)
	c.read = time.Time{} // the kernel has announced no changes since the last Apply
	var watcher sync.WaitGroup
	defer watcher.Wait()
	defer stop()
	if socket, err := c.watch.start(); err == nil {
		watcher.Go(func() {
			err := c.watch.run(watching, socket, func() { chans.Wake(c.rules) })
			if watching.Err() == nil {
				c.log.Warn("the kernel no longer announces changes of rules, so only checks find them", "error", err)
				chans.Wake(c.rules)
			}
		})
	}
	err := c.loop(ctx)
	c.openUntil = time.Now().Add(c.openLimit)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout+c.openLimit)
	defer cancel()
	return errors.Join(err, c.end(ctx))
}

// Apply installs the rules, replaces all other rules of nametap, and removes nametap's rules in the other backend.
// If the rules are installed already, it changes nothing. Each family has all of its rules or none.
//
// A family or a part of the rules that this machine does not support is left out, and logged. Any other failure is
// retried for about 2 s. After that the rules that work are installed, and Apply returns [ErrIncomplete]. If Apply
// returns another error, each family has the rules that it had before, or none.
func (c *Capture) Apply(ctx context.Context) error { return c.switchCapture(ctx, true) }

// Remove removes all rules and chains of nametap, in both backends and families, whatever configuration they belong
// to. It leaves rules of other programs unchanged. It is no error if nametap has no rules.
//
// If a backend can never be read, for example because a capability is missing, Remove removes what is in the other
// backend. It then returns [ErrUnseen], unless the kernel reports the unreadable backend as empty. If c has
// installed rules in that backend, or if the backend may be readable later, Remove returns another error.
//
// Remove takes the same steps as Keep. When ctx ends it does not wait for replies in flight any longer. A step
// that fails for a reason that may pass is retried for some seconds.
func (c *Capture) Remove(ctx context.Context) error { return c.switchCapture(ctx, false) }

// switchCapture turns capture on or off, and returns when that is done or has failed.
func (c *Capture) switchCapture(ctx context.Context, on bool) error {
	d := c.target.Load().Desired
	d.On = on
	if err := c.Set(d); err != nil {
		return err
	}
	c.goal = c.target.Load()
	if c.phase == phaseRemoved {
		c.phase = phaseUntouched // another process may have installed rules since
	}
	c.restart()
	return c.reach(ctx)
}

// loop takes the steps of Keep until ctx ends, or until the rules cannot be installed at the start. The caller then
// removes the rules.
func (c *Capture) loop(ctx context.Context) error {
	begun := false
	for ctx.Err() == nil {
		c.take()
		if waits := !c.goal.On || c.phase == phaseCaptured || !c.stepDue(); waits && !begun {
			begun = true
			close(c.begun)
		}
		if !c.stepDue() {
			c.sleep(ctx)
			continue
		}
		wasCaptured := c.captured
		err := c.step(ctx)
		switch {
		case ctx.Err() != nil:
		case !begun && err != nil && !errors.Is(err, ErrIncomplete):
			return fmt.Errorf("capturing DNS: %w", err)
		case !c.goal.On:
			c.logRemoval(wasCaptured, err)
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
	if previous == nil || c.goal.sameRules(previous) {
		return
	}
	if !c.goal.On && (previous.On || !previous.set) {
		c.log.Info("DNS capture is off", "because", c.goal.Because)
	}
	c.restart()
}

// restart makes the next step begin at once. The step reads from the kernel which rules there are.
func (c *Capture) restart() {
	if c.phase == phaseCaptured {
		c.phase = phaseOutdated
	}
	if c.phase != phaseUnhooked || c.goal.On || c.failure != nil {
		c.due = time.Time{} // in the other cases the chains stay for replies in flight
	}
	c.lacksDue = time.Time{}
	c.logged.Forget()
	c.failure, c.tries = nil, 0
}

// reached reports whether there is nothing to do until the desired value changes.
func (c *Capture) reached() bool { return !c.goal.set || !c.goal.On && c.phase == phaseRemoved }

// stepDue reports whether it is time for a step.
func (c *Capture) stepDue() bool { return !c.reached() && !time.Now().Before(c.due) }

// sleep returns when the desired value changed, the next step is due, or ctx ends.
func (c *Capture) sleep(ctx context.Context) {
	timer := time.NewTimer(time.Until(c.due))
	defer timer.Stop()
	due := timer.C
	if c.reached() {
		due = nil
	}
	select {
	case <-ctx.Done():
	case <-c.changed:
	case <-c.rules:
		c.read = time.Time{}
		if c.phase == phaseCaptured && c.ready.Before(c.due) {
			c.due = c.ready
		}
	case <-due:
	}
}

// reach takes steps until the goal is reached or a step returns an error. The caller has called restart.
func (c *Capture) reach(ctx context.Context) error {
	for !c.reached() && c.phase != phaseCaptured {
		if !c.stepDue() {
			if c.sleep(ctx); ctx.Err() == nil {
				continue
			}
			if c.failure != nil {
				return c.failure
			}
			c.due = time.Time{} // no longer wait for replies in flight
		}
		if err := c.step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// step takes the next step to the goal. If a removal has failed and is retried soon, the error is nil.
func (c *Capture) step(ctx context.Context) error {
	defer c.publish()
	began := time.Now()
	switch {
	case c.goal.On && c.phase == phaseCaptured:
		err := c.check(ctx)
		c.due = c.nextCheck(began)
		return err
	case c.goal.On:
		c.read = began
		c.firewall.start(c.inst.backend != "", c.watch.lastChange())
		changed, err := c.apply(ctx, c.captured)
		c.due = c.nextCheck(began)
		if err == nil || errors.Is(err, ErrIncomplete) {
			c.phase, c.captured = phaseCaptured, true
			c.settle, c.remains, c.tries = 0, nil, 0
		} else {
			c.phase, c.captured = phaseOutdated, c.captured && c.inst.backend != ""
		}
		c.logCaptured(changed, err)
		return withoutCapability(err)
	case c.phase != phaseUnhooked:
		return c.unhookAll(ctx)
	case ctx.Err() == nil && c.inUse():
		c.due = began.Add(openPause)
		return nil
	}
	return c.removeAll(ctx)
}

// check compares the kernel with what was installed, repairs what differs, and tries again to
// install what is missing. Between two readings of the rules it only drops conntrack entries, see [Capture.readDue].
func (c *Capture) check(ctx context.Context) error {
	c.checks.Add(1)
	c.firewall.look(c.watch.lastChange())
	if leaseBegan := c.leaseBegan.Swap(false); leaseBegan || c.entries.needsSweep() {
		c.entries.sweep(c.goal.Config, c.inst, leaseBegan)
	}
	if !c.retryDue() && !c.firewall.due() && time.Now().Before(c.readDue()) {
		return nil
	}
	c.read = time.Now()
	err := c.repair(ctx)
	if err != nil {
		c.read = time.Time{}
	}
	return err
}

// readDue returns when the rules are to be read again. If the kernel announces changes, they are read after a change,
// and otherwise once a minute, or when a probe was not answered ([Capture.Look]).
func (c *Capture) readDue() time.Time {
	switch {
	case c.read.IsZero():
		return c.read
	case c.watch.isRunning() && c.inst.backend == NFT:
		return c.read.Add(quietInterval)
	}
	return c.read.Add(unannounced * c.goal.Config.Interval)
}

// unannounced is how many intervals pass between two readings of rules whose changes the kernel does not announce: a
// minute, if Config.Interval is 5 s.
const unannounced = 12

// repair reads the rules and repairs the rules that differ. It may leave table filter to a later check (see
// [filterRepair]).
func (c *Capture) repair(ctx context.Context) error {
	s := inspect(ctx, c.goal.Config, c.backend)
	drifts, err := c.drifts(s)
	if err != nil || len(drifts) == 0 && !c.retryDue() {
		c.firewall.record(s, c.inst)
		return err
	}
	changed, err := c.apply(ctx, c.captured)
	switch {
	case err != nil && !errors.Is(err, ErrIncomplete):
	case len(drifts) > 0:
		c.log.Warn("capture rules had drifted and were repaired", "drift", drifts)
		text := strings.Join(drifts, "; ")
		c.drift.Store(&text)
		c.repairs.Add(1)
	default:
		c.logCaptured(changed, nil)
	}
	return err
}

// unhookAll ends the capture. If replies may be in flight, the chains stay for the settle time.
func (c *Capture) unhookAll(ctx context.Context) error {
	c.inst, c.firewall = installation{}, filterRepair{}
	for _, f := range family.All() {
		if _, err := c.lease.end(f); err != nil {
			c.log.Warn("the lease of the capture rules cannot be ended: queries are captured until the rules are removed", "error", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, c.goal.Config.Patience)
	defer cancel()
	found, unseen, err := c.eachOwn(ctx, func(p place, inKernel saved) error {
		used, err := c.unhook(ctx, p, inKernel)
		if used {
			c.settle = c.goal.Config.Settle
		}
		return err
	})
	switch {
	case err != nil:
		return c.postpone(err, unseen)
	case !found:
		return c.recordRemoval(unseen)
	}
	c.log.Info("DNS is no longer captured")
	c.phase, c.due = phaseUnhooked, time.Now().Add(c.settle)
	c.failure, c.tries = nil, 0
	return nil
}

// removeAll removes what unhookAll has left.
func (c *Capture) removeAll(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	_, unseen, err := c.eachOwn(ctx, func(p place, inKernel saved) error {
		_, _, err := p.converge(ctx, inKernel, Rules{})
		return err
	})
	if err != nil {
		return c.postpone(err, unseen)
	}
	return c.recordRemoval(unseen)
}

// recordRemoval records the end of a removal. It returns the parameter unseen: nil, or an error that says only that
// rules of another process may remain.
func (c *Capture) recordRemoval(unseen error) error {
	clear(c.placed)
	c.phase, c.captured, c.settle, c.tries, c.failure, c.remains = phaseRemoved, false, 0, 0, nil, nil
	return unseen
}

// postpone sets when to retry a step of a removal that has failed. It returns an error if the failure is to be reported
// now: if it is not temporary, or has lasted for Config.Patience.
func (c *Capture) postpone(failure, unseen error) error {
	patience := c.goal.Config.Patience
	pause := clock.BackOff(c.tries, firstPause, patience)
	if !temporary(failure) {
		pause = patience
	}
	c.tries++
	c.failure, c.due = errors.Join(failure, unseen), time.Now().Add(pause)
	if pause < patience {
		return nil
	}
	c.remains = c.failure
	return c.failure
}

// openPause is the pause between two looks for open connections.
const openPause = 250 * time.Millisecond

// inUse reports whether the chains have to stay for open connections.
func (c *Capture) inUse() bool {
	return c.open != nil && (c.openUntil.IsZero() || time.Now().Before(c.openUntil)) && c.open()
}

// nextCheck returns when the next check is due if the kernel announces no change before. It also sets c.ready, which
// is when the check is due after an announcement. The last step began at the time stepStart, and has just ended. The
// pause before a check is at least as long as this step took, so checks take at most half of the time.
func (c *Capture) nextCheck(stepStart time.Time) time.Time {
	took := time.Since(stepStart)
	if !c.firewall.since.IsZero() { // these checks wait for a firewall, and leave those that may follow at once
		c.ready = stepStart.Add(2 * took)
		return stepStart.Add(max(firewallPause, 2*took))
	}
	interval := c.goal.Config.Interval
	if longest := stepStart.Add(-checksAtOnce * interval); c.paced.Before(longest) {
		c.paced = longest
	}
	c.paced = c.paced.Add(interval)
	c.ready = stepStart.Add(2 * took)
	if c.ready.Before(c.paced) {
		c.ready = c.paced
	}
	soon, due := stepStart.Add(max(interval, 2*took)), c.readDue()
	if !c.inst.complete() && c.lacksDue.Before(due) {
		due = c.lacksDue
	}
	if c.inst.failed() || c.entries.needsSweep() || due.Before(soon) {
		return soon
	}
	return due
}

// checksAtOnce is how many announcements in a row may each cause a check without delay. Further announcements cause
// one check in each Config.Interval, for example if another program changes nft rules all the time.
const checksAtOnce = 10

// endTimeout bounds the removal at the end of Keep: the settle time, and the time of the tools.
const endTimeout = 15 * time.Second

// end removes the rules at the end of Keep, unless they are to stay. It ignores later
// changes of the desired value.
func (c *Capture) end(ctx context.Context) error {
	on := c.goal.On || !c.goal.set // before the first Set, rules of an earlier agent count as those of this one
	kept := on && c.goal.Config.FailClosed
	ending := Ending(c.ending.Load())
	switch {
	case ending == Leave && on && c.phase != phaseUnhooked:
		c.log.Info("the capture rules stay for the next agent")
		return nil
	case c.phase == phaseRemoved, kept && !c.captured:
		return nil
	case kept && c.phase != phaseUnhooked:
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
	wasCaptured := c.captured
	err := c.reach(ctx)
	if err != nil && c.phase != phaseRemoved {
		return fmt.Errorf("removing the capture rules (`nametap capture remove` does that too): %w", err)
	}
	if wasCaptured {
		c.log.Info("capture rules removed")
	}
	return nil
}

// logCaptured logs that rules were installed or replaced.
func (c *Capture) logCaptured(changed bool, err error) {
	if changed && err == nil {
		c.log.Info("DNS is captured", "port", c.goal.Config.Port, "backend", c.backend, "because", c.reason)
	}
}

// logFailure counts a failure of a check, a repair or a retry, and logs it unless it is the same as the previous
// failure.
func (c *Capture) logFailure(err error) {
	if err != nil {
		c.failures.Add(1)
	}
	switch {
	case !c.logged.Differs(err):
	case errors.Is(err, ErrIncomplete):
		c.log.Error("capture is incomplete; retrying", "error", err)
	default:
		c.log.Error("the capture rules cannot be checked or repaired; retrying", "error", err)
	}
}

// logRemoval logs the failure of a step of a removal. wasCaptured is true if this process had
// rules installed.
func (c *Capture) logRemoval(wasCaptured bool, err error) {
	switch {
	case err == nil:
	case c.phase != phaseRemoved:
		c.log.Error("the capture rules cannot be removed; retrying", "error", err)
	case wasCaptured:
		c.log.Info("removed the capture rules of this agent; rules of an earlier agent may remain", "error", err)
	default:
		c.log.Warn("capture rules of an earlier agent may remain", "error", err)
	}
}

// publish makes the state of c visible to other goroutines.
func (c *Capture) publish() {
	r := &report{goal: c.goal, inst: c.inst, backend: c.backend, reason: c.reason, outdated: c.phase != phaseCaptured, captured: c.captured}
	if c.remains != nil {
		r.remaining = c.remains.Error()
	}
	c.report.Store(r)
	if c.changes {
		c.changes = false
		c.lease.forget()
		chans.Wake(c.installed)
	}
}

// Levels returns how much of each family is captured, as of the last step. It does not read the kernel.
func (c *Capture) Levels() map[family.Family]Level {
	r, levels := c.report.Load(), make(map[family.Family]Level)
	for _, f := range family.All() {
		levels[f] = r.level(f)
	}
	return levels
}

// Failure returns why the last attempt to install the rules of a family has failed. It returns nil if the attempt
// has succeeded.
func (c *Capture) Failure(f family.Family) error { return c.report.Load().inst.missing[f] }

// Captured reports whether rules were installed and not removed since.
func (c *Capture) Captured() bool { return c.report.Load().captured }

// Active reports whether queries are captured: rules are installed, and they match.
func (c *Capture) Active() bool {
	r := c.report.Load()
	active := len(r.inst.families) == 0 && !r.outdated // true if the goal needs no rules, because no query can be captured
	for f, v := range r.inst.families {
		active = active || r.goal.captures(f) && (!v.lease || c.lease.alive(f))
	}
	return r.captured && active
}

// Leased reports whether the installed rules have a lease. Then the kernel ends the capture when no agent renews
// the lease.
func (c *Capture) Leased() bool {
	inst := c.report.Load().inst
	return len(inst.families) > 0 && !inst.unleased()
}

// Remaining says why rules may still be in the kernel although they were to be removed. It returns "" if no removal
// has failed.
func (c *Capture) Remaining() string { return c.report.Load().remaining }

// Stats counts what Keep has done.
type Stats struct {
	Checks   uint64 // checks of the rules
	Repairs  uint64 // repairs of rules that differed
	Failures uint64 // checks, repairs and retries that failed
	Drift    string // how the rules differed before the last repair
}

// Stats returns the counts so far.
func (c *Capture) Stats() Stats {
	stats := Stats{Checks: c.checks.Load(), Repairs: c.repairs.Load(), Failures: c.failures.Load()}
	if drift := c.drift.Load(); drift != nil {
		stats.Drift = *drift
	}
	return stats
}

// Status reads both backends. It changes nothing and does not wait for Keep.
func (c *Capture) Status(ctx context.Context) (Status, error) {
	r := c.report.Load()
	return r.status(ctx, inspectAll(ctx, r.goal.Config))
}

// Left reports whether rules in the kernel enforce the policy of a guard, and whether all rules of nametap have a lease: then
// they capture nothing once no agent renews the lease. It must not be called while rules are changed.
func (c *Capture) Left(ctx context.Context) (enforced, endsByItself bool) {
	return inspectAll(ctx, c.goal.Config).left()
}

// Check lists what this machine has and lacks for the configured rules, and how to get what it lacks. It changes
// nothing: it tries the rules in a new network namespace. If it cannot make one, it tests only their syntax.
func (c *Capture) Check(ctx context.Context) []Finding {
	goal := c.report.Load().goal
	return checkMachine(ctx, goal.Config, goal.variants)
}
