package iptables

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/family"
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
		if got := nextStep(test.desired, test.now, test.due); got != test.want {
			t.Errorf("set %v, on %v, phase %d, due %v: step %d, want %d", test.desired.set, test.desired.On, test.now, test.due, got, test.want)
		}
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

// K13: what the kernel does not support is tried again after pauses that double up to an hour, because each attempt
// interrupts the capture. After any other failure, each check tries again.
func TestLacks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		i := &installer{goal: &target{Desired: Desired{Config: Config{Interval: 5 * time.Second}}}}
		install := func(reduced map[family.Family]error) {
			i.noteLacks(installation{backend: NFT, reduced: reduced})
			i.inst = installation{backend: NFT, reduced: reduced}
		}
		lacking := map[family.Family]error{family.IPv6: errMissing}
		for _, pause := range []time.Duration{5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600} {
			install(lacking)
			<-time.After(pause*time.Second - 1)
			install(lacking) // without an attempt
			if i.retryDue() {
				t.Fatalf("tried again before %v", pause*time.Second)
			}
			if <-time.After(1); !i.retryDue() {
				t.Fatalf("not tried again after %v", pause*time.Second)
			}
		}
		if install(map[family.Family]error{family.IPv4: errors.New("a failure"), family.IPv6: errMissing}); !i.retryDue() {
			t.Error("a failure that passes is not tried again by the next check")
		}
		if install(nil); i.retryDue() {
			t.Error("complete rules are tried again")
		}
	})
}

// K10: an announcement of the kernel causes a check at once, ten times in a row, then once in each interval. Without
// announcements, checks of complete nft rules are rare, and legacy, which has none, is checked once a minute. A check that took long is followed by a pause as long.
func TestNextCheck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const interval = 5 * time.Second
		c := &Capture{installer: installer{goal: &target{Desired: Desired{Config: Config{Interval: interval}}}, inst: installation{backend: NFT}}}
		began, atOnce, all := time.Now(), 0, 0
		for c.nextCheck(time.Now()); !c.ready.After(began.Add(time.Minute)); c.nextCheck(time.Now()) {
			<-time.After(time.Until(c.ready))
			if all++; time.Now().Equal(began) {
				atOnce++
			}
		}
		if atOnce != 10 || all != 10+12 {
			t.Errorf("%d checks at once, %d in a minute, want 10 and 22", atOnce, all)
		}
		for _, test := range []struct {
			backend Backend
			watched bool
			want    time.Duration
		}{{NFT, false, time.Minute}, {NFT, true, time.Hour}, {Legacy, true, time.Minute}} {
			c.inst.backend, c.read = test.backend, time.Now()
			c.watch.subscribed.Store(test.watched)
			if due := time.Until(c.nextCheck(time.Now())); due != test.want {
				t.Errorf("%+v: the next check is due in %v", test, due)
			}
		}
		start := time.Now()
		<-time.After(time.Minute)
		if due := time.Until(c.nextCheck(start)); due != time.Minute || time.Until(c.ready) != time.Minute {
			t.Errorf("after a check of a minute, the next is due in %v", due)
		}
	})
}

// V8, K10: the repair of table filter waits until no program has changed nft rules for 0.2 s, or for 2 s if the table
// has no rule, and for 2 s at most. Without announcements, it does not wait.
func TestFilterRepair(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		vs, err := variants(DefaultConfig())
		if err != nil {
			t.Fatal(err)
		}
		inst := installation{backend: NFT, families: map[family.Family]variant{family.IPv4: vs[0]}}
		step := func(w *filterRepair, changed time.Time, rules string) (waits bool) {
			w.look(changed)
			waits = w.spare(family.IPv4) == filterTable
			if due := w.due(); due == waits && len(w.lacks) > 0 {
				t.Errorf("a repair that waits is %v, a repair is due is %v", waits, due)
			}
			w.record(newSide(t, NFT, rules), inst)
			return waits
		}
		const site = "*filter\n-A OUTPUT -d 192.0.2.1 -j DROP\nCOMMIT\n"
		for _, test := range []struct {
			rules string
			every time.Duration // between the changes of the firewall; 0 for one change
			want  time.Duration
		}{{site, 0, 200 * time.Millisecond}, {"", 0, 2 * time.Second}, {site, 100 * time.Millisecond, 2 * time.Second}, {"", time.Second, 2 * time.Second}} {
			w, began := new(filterRepair), time.Now()
			changed := began
			for step(w, changed, test.rules) {
				<-time.After(10 * time.Millisecond)
				if test.every > 0 && time.Since(changed) >= test.every {
					changed = time.Now()
				}
			}
			if took := time.Since(began); took != test.want {
				t.Errorf("%+v: repaired after %v", test, took)
			}
		}
		if step(new(filterRepair), time.Time{}, site) {
			t.Error("without announcements the repair waits")
		}
	})
}
