package iptables

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

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

// next returns the next step from a phase to the desired value. due says whether the time for
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

// next returns the next step now.
func (c *Capture) next() step { return next(c.goal, c.phase, !time.Now().Before(c.due)) }

// endTimeout bounds the removal at the end of Keep: the settle time, and the time of the tools.
const endTimeout = 15 * time.Second

// Keep keeps the kernel as desired until ctx ends: it follows every change of the desired value,
// repairs drift within Config.Interval, and retries what fails. It takes over rules that are
// installed, and replaces those that differ. At the end it removes the rules, unless
// Config.FailClosed is set or SetEnding says otherwise.
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
			err := announced.forward(watching, c.rules)
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
	c.attempts, c.logged = patient, ""
	c.retries.failure, c.retries.n = nil, 0
}

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

// nextCheck returns when to check the rules after a step that has just ended, if no program changes them
// before. On a machine where steps take longer than Config.Interval, half of the time is left to other
// programs.
func (c *Capture) nextCheck(began time.Time) time.Time {
	took := time.Since(began)
	c.ready = began.Add(2 * took)
	if c.watched.Load() && c.in.backend == NFT && c.in.complete() && !c.entries.pending() {
		return began.Add(quietInterval)
	}
	return began.Add(max(c.goal.Config.Interval, 2*took))
}

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

// Apply installs the rules in place of any others of nametap, and removes those in the other
// backend. It changes nothing if they are installed already. Each family has all of its rules
// or none.
//
// What this machine lacks (a family, the zone) is left out, and logged. Any other failure is
// retried for about 2 s. After that the rules that work are installed, and Apply returns
// [ErrIncomplete]. After any other error the first Apply leaves no rules.
func (c *Capture) Apply(ctx context.Context) error { return c.once(ctx, true) }

// Remove removes all rules and chains of nametap, in both backends and families, whatever
// configuration they were made of. It leaves rules of other programs unchanged. It is no error
// if there are none.
//
// If a backend can never be read, for example without a capability, Remove does the rest and
// returns [ErrUnseen], unless the kernel says that the backend is empty. If c has installed
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
