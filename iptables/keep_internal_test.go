package iptables

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/family"
)

// K13: a removal with a transient error is retried for some seconds before it is reported. With a
// lasting error it is reported at once and retried after 15 s.
func TestRetries(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const patience = 15 * time.Second
		goal := &target{Desired: Desired{Config: Config{Patience: patience}}}
		c := &Capture{installer: installer{goal: goal}}
		start, tries := time.Now(), 0
		for ; c.postpone(errors.New("a failure"), nil) == nil; tries++ {
			<-time.After(time.Until(c.due))
		}
		if took := time.Since(start); took < patience || took > 2*patience || tries < 5 || c.remains == nil {
			t.Errorf("reported after %v and %d retries", took, tries)
		}
		c = &Capture{installer: installer{goal: goal}}
		if err := c.postpone(errRefused, nil); err == nil || time.Until(c.due) != patience {
			t.Errorf("%v, tried again after %v", err, time.Until(c.due))
		}
	})
}

// K13: what the kernel does not support is tried again every ten minutes, because each attempt interrupts the capture.
// After any other failure, each check tries again.
func TestLacks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		i := &installer{inst: installation{backend: NFT, reduced: map[family.Family]error{family.IPv6: errMissing}}, lacksDue: time.Now().Add(time.Minute)}
		if i.retryDue() {
			t.Error("tried again too early")
		}
		if <-time.After(time.Minute); !i.retryDue() {
			t.Error("not tried again")
		}
		i.lacksDue = time.Now().Add(time.Minute)
		if i.inst.missing = map[family.Family]error{family.IPv4: errors.New("a failure")}; !i.retryDue() {
			t.Error("a failure that passes is not tried again by the next check")
		}
		if i.inst.missing, i.inst.reduced = nil, nil; i.retryDue() {
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
			waits = w.spare() == filterTable
			if due := w.due(); due == waits && !w.since.IsZero() {
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

// V2: a lease is not known if this process cannot ask for it.
func TestLeaseUnknown(t *testing.T) { // not parallel: no test can open files meanwhile
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) }()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}); err != nil {
		t.Fatal(err)
	}
	if state := leaseState(family.IPv4); state != LeaseUnknown {
		t.Errorf("the lease is %s", state)
	}
}
