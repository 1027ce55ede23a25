package iptables

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// K9: the next step for each desired value and each phase.
func TestNext(t *testing.T) {
	t.Parallel()
	unset, off, on := &target{}, &target{set: true}, &target{set: true, Desired: Desired{On: true}}
	for _, test := range []struct {
		desired *target
		now     phase
		due     bool
		want    step
	}{
		{unset, phaseUntouched, true, stepNone},
		{unset, phaseCaptured, true, stepNone},

		{on, phaseUntouched, true, stepApply},
		{on, phaseOutdated, true, stepApply},
		{on, phaseOutdated, false, stepWait}, // after a failure
		{on, phaseCaptured, false, stepWait},
		{on, phaseCaptured, true, stepCheck},
		{on, phaseUnhooked, true, stepApply}, // capture is on again while replies are in flight
		{on, phaseRemoved, true, stepApply},

		{off, phaseUntouched, true, stepUnhook}, // an earlier agent may have left rules
		{off, phaseCaptured, true, stepUnhook},
		{off, phaseOutdated, true, stepUnhook},
		{off, phaseOutdated, false, stepWait}, // after a failure
		{off, phaseUnhooked, false, stepWait}, // replies are in flight
		{off, phaseUnhooked, true, stepRemove},
		{off, phaseRemoved, true, stepNone},
		{off, phaseRemoved, false, stepNone},
	} {
		t.Run(fmt.Sprintf("set %v on %v phase %d due %v", test.desired.set, test.desired.On, test.now, test.due), func(t *testing.T) {
			if got := nextStep(test.desired, test.now, test.due); got != test.want {
				t.Errorf("step %d, want %d", got, test.want)
			}
		})
	}
}

// K13: a removal with a transient error is retried for 15 s before it is reported. With a
// lasting error it is reported at once and retried after 15 s.
func TestRetries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const patience = 15 * time.Second
		goal := &target{Desired: Desired{Config: Config{Patience: patience}}}
		c := &Capture{installer: installer{goal: goal}}
		failure := errors.New("a failure")
		start := time.Now()
		for c.postpone(failure, true) == nil {
			if wait := time.Until(c.due); wait > 2*longestPause || c.retries.reported != nil {
				t.Fatalf("tried again after %v, reported %v", wait, c.retries.reported)
			}
			<-time.After(time.Until(c.due))
		}
		if took := time.Since(start); took < patience || c.retries.reported == nil || time.Now().Before(c.due) {
			t.Errorf("reported after %v, tried again in %v", took, time.Until(c.due))
		}
		c = &Capture{installer: installer{goal: goal}}
		if err := c.postpone(failure, false); err == nil || time.Until(c.due) != patience {
			t.Errorf("%v, tried again after %v", err, time.Until(c.due))
		}
	})
}
