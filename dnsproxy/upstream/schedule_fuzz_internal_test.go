package upstream

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// FuzzSchedule drives a schedule with any events, and checks what holds for all of them: it
// always wants to be woken later, it ends at its deadline, and it ends with a reply if there
// was one. An answer is replaced only by an earlier server's answer, once.
func FuzzSchedule(f *testing.F) { // F3, F4
	f.Add([]byte{0, 0, 0, 0, 0, 0}, uint8(0))
	f.Add([]byte{3, 9, 0, 1, 17, 0, 2, 0}, uint8(2))
	f.Add([]byte{0, 5, 0, 7, 0, 8, 0, 6}, uint8(4))
	f.Add([]byte{1, 2, 3, 4, 9, 10, 11, 12}, uint8(0xff))
	f.Fuzz(func(t *testing.T, events []byte, settings uint8) {
		start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		d := driver{t: t, now: start, schedule: schedule{
			options:  Options{Fastest: settings&1 > 0},
			sendOnce: settings&8 > 0, edns: settings&16 > 0, retryTCP: settings&32 > 0,
			deadline: start.Add(defaultTimeout), budget: new(budget),
		}}
		standings := []standing{up, silent, down, looping, up12ms, up90ms}
		for i := range 1 + int(settings>>6) {
			d.schedule.tries = append(d.schedule.tries, try{})
			d.schedule.setStanding(i, standings[int(settings>>3)%len(standings)])
		}
		d.schedule.start(d.now)
		d.takeActions()
		for ; len(events) > 0 && !d.schedule.over; events = events[1:] {
			switch op, arg := events[0]&3, int(events[0]>>2); op {
			case 0:
				d.wake()
			case 1:
				d.schedule.setStanding(arg%len(d.schedule.tries), standings[arg/8%len(standings)])
			default:
				d.receive(arg)
			}
		}
		for !d.schedule.over {
			d.wake()
		}
		if s := &d.schedule; s.reply == nil && d.replied {
			t.Errorf("there was a reply, and the end is %v", s.cause)
		}
	})
}

// A driver drives a schedule and knows which attempts are in flight.
type driver struct {
	t        *testing.T
	schedule schedule
	now      time.Time
	inFlight []outcome // without their results
	sent     []int     // how often, by try
	replied  bool      // there was an answer or a failure that can be relayed
}

func (d *driver) wake() {
	at := d.schedule.wakeAt()
	if at.Before(d.now) || at.After(d.schedule.deadline) {
		d.t.Fatalf("%v before the deadline it wants to be woken %v later", d.schedule.deadline.Sub(d.now), at.Sub(d.now))
	}
	d.now = at
	d.schedule.wake(d.now)
	d.takeActions()
	if !d.schedule.over && !d.schedule.wakeAt().After(d.now) {
		d.t.Fatalf("it wants to be woken again at once: %+v", d.schedule)
	}
}

// receive ends an attempt in flight.
func (d *driver) receive(arg int) {
	if len(d.inFlight) == 0 {
		return
	}
	i := arg / 8 % len(d.inFlight)
	o := d.inFlight[i]
	d.inFlight = slices.Delete(d.inFlight, i, i+1)
	o.reply = []byte{}
	switch arg % 8 {
	case 0:
		o.reading.negative, o.reading.code = true, dns.RcodeNameError
	case 1:
		o.reading.truncated = true
	case 2:
		o.reading.code = dns.RcodeServerFailure
	case 3:
		o.reading.code = dns.RcodeFormatError
	case 4:
		o.reading.err = errMalformedQuery
	case 5:
		o.err, o.reply = syscall.ECONNREFUSED, nil
	}
	retried := o.reading.rejectsEDNS() && !o.noOPT && d.schedule.edns
	d.replied = d.replied || o.err == nil && o.reading.err == nil && !retried
	before := d.schedule
	d.schedule.receive(o, d.now)
	if s := &d.schedule; before.answered && (before.replaced && s.winner != before.winner || s.winner > before.winner) {
		d.t.Fatalf("the answer of %d was replaced by the answer of %d", before.winner, s.winner)
	}
	d.takeActions()
}

// takeActions takes the actions of the schedule and checks them.
func (d *driver) takeActions() {
	s := &d.schedule
	if d.sent == nil {
		d.sent = make([]int, len(s.tries))
	}
	for _, action := range s.actions {
		if action.kind != actSend {
			continue
		}
		t := &s.tries[action.try]
		d.inFlight = append(d.inFlight, outcome{try: action.try, stream: t.stream, noOPT: t.noOPT})
		d.sent[action.try]++
		if ways := 1 + count(t.stream) + count(t.noOPT); s.sendOnce && d.sent[action.try] > ways {
			d.t.Fatalf("rule 8: sent %d times to server %d", d.sent[action.try], action.try)
		}
	}
	s.actions = s.actions[:0]
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
