package iptables

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// A phase is what is known of the kernel.
type phase int

const (
	untouched phase = iota // no step was done
	captured               // the rules of the goal are in, as far as they can be had
	outdated               // other rules are in, or may be
	unhooked               // nothing is captured; chains stay for replies in flight
	removed                // nothing of nametap is there
)

// A step is one thing to do.
type step int

const (
	stepNone   step = iota // nothing until the desired value changes
	stepWait               // nothing until a step is due
	stepApply              // put the rules in
	stepCheck              // look for drift, and repair it
	stepUnhook             // end the capture, and keep what replies in flight need
	stepRemove             // remove the rest
)

// next returns the step that leads from a phase to what is desired.
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

// next returns the next step.
func (c *Capture) next() step { return next(c.goal, c.phase, !time.Now().Before(c.due)) }

// endTimeout bounds the removal at the end of Keep: the settle time of queries in
// flight, and the tools.
const endTimeout = 15 * time.Second

// Keep keeps the kernel as desired until ctx ends: it follows every change of the desired
// value, repairs drift within Config.Interval, and retries what fails. What Apply has put
// in before is taken over. Then it removes the rules, unless Config.FailClosed is set.
//
// If the first desired value is on and its rules cannot be put in, Keep leaves none in
// and returns the error. Later failures are logged and counted.
//
// A removal is in two steps. No query is captured any more after the first. If any was of
// late, chains stay for Config.Settle, with nothing that jumps to them: with the last rule
// that needs it the kernel stops to track connections and to translate addresses, and
// replies in flight would be lost. If capture is desired again meanwhile, the rules are
// complete again after one write.
func (c *Capture) Keep(ctx context.Context) error {
	err := c.loop(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
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
			c.sayRemoval(had, err)
		default:
			c.sayFailure(err)
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

// restart has the goal reached from what is there, at once.
func (c *Capture) restart() {
	if c.phase == captured {
		c.phase = outdated
	}
	if c.phase != unhooked || c.goal.On || c.retries.failure != nil {
		c.due = time.Time{} // otherwise replies are in flight
	}
	c.attempts = patient
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
	case <-due:
	}
}

// act does one step. The error is nil for a removal that is soon tried again.
func (c *Capture) act(ctx context.Context, s step) error {
	defer c.publish()
	interval := time.Now().Add(c.goal.Config.Interval)
	switch s {
	case stepApply:
		changed, err := c.apply(ctx, c.attempts)
		c.due, c.attempts = interval, brief
		if err == nil || errors.Is(err, ErrIncomplete) {
			c.phase, c.captured = captured, true
			c.settle, c.retries = 0, retries{}
		} else {
			c.phase, c.captured = outdated, c.captured && c.in.backend != ""
		}
		c.sayCaptured(changed, err)
		return withoutCapability(err)
	case stepCheck:
		c.due = interval
		return c.check(ctx)
	case stepUnhook:
		return c.unhookAll(ctx)
	case stepRemove:
		return c.removeAll(ctx)
	}
	return nil
}

// sayCaptured logs that rules were put in or replaced.
func (c *Capture) sayCaptured(changed bool, err error) {
	if changed && err == nil {
		c.log.Info("DNS is captured", "port", c.goal.Config.Port, "backend", c.in.backend, "because", c.in.reason)
	}
}

// sayFailure counts a failure of a check, a repair or a retry, and logs it if it is not
// the same as the previous one.
func (c *Capture) sayFailure(err error) {
	if err == nil {
		c.said = ""
		return
	}
	c.failures.Add(1)
	text := err.Error()
	if text == c.said {
		return
	}
	c.said = text
	if errors.Is(err, ErrIncomplete) {
		c.log.Error("capture is incomplete; it is tried again", "error", err)
		return
	}
	c.log.Error("the capture rules cannot be kept; it is tried again", "error", err)
}

// Apply puts the rules in, in place of any others of nametap, and removes those in the
// backend in which they do not belong. It changes nothing if they are there already. Each
// family has all of its rules or none.
//
// What this machine lacks (a family, the zone) is left out, and logged. A failure that
// does not say so is retried for about 2 s; if it stays, rules that could be had are in,
// and Apply returns [ErrIncomplete]. After any other error the first Apply leaves no
// rules in.
func (c *Capture) Apply(ctx context.Context) error { return c.once(ctx, true) }

// Remove removes all rules and chains of nametap, of both backends and families, whatever
// configuration put them there. Rules of other programs stay as they are. It is no error
// if there are none. Where a backend can never be read, such as for want of a capability,
// c has put no rules there, and the kernel does not say that it is empty, Remove returns
// [ErrUnseen] after it has done the rest. Any other backend that cannot be read is a
// failure.
//
// It is the removal of Keep, on the caller's goroutine: when ctx ends the wait for replies
// in flight is cut short. What fails for a reason that may pass is retried for some
// seconds.
func (c *Capture) Remove(ctx context.Context) error { return c.once(ctx, false) }

// once turns capture on or off and returns when that is done or has failed.
func (c *Capture) once(ctx context.Context, on bool) error {
	d := c.target.Load().Desired
	d.On = on
	if err := c.Set(d); err != nil {
		return err
	}
	c.goal = c.target.Load()
	if c.phase == removed {
		c.phase = untouched // other programs may have put rules in since
	}
	c.restart()
	return c.reach(ctx)
}

// end removes the rules at the end of Keep, unless they are to stay. The desired value
// does not count any more.
func (c *Capture) end(ctx context.Context) error {
	kept := c.goal.On && c.goal.Config.FailClosed
	switch {
	case c.phase == removed, c.phase == untouched && (c.goal.On || !c.goal.set), kept && !c.captured:
		return nil
	case kept && c.phase != unhooked:
		c.log.Warn("the capture rules stay: queries wait for the next agent, or are refused; `nametap capture remove` removes them")
		return nil
	}
	off := *c.goal
	off.On, off.set = false, true
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

// reach takes steps until the goal is reached or a step has failed for good.
func (c *Capture) reach(ctx context.Context) error {
	for {
		switch s := c.next(); {
		case s == stepNone, s == stepWait && c.phase == captured:
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
			c.due = time.Time{} // replies in flight are not waited for any longer
		}
	}
}
