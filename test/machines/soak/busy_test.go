package soak

import (
	"context"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

// The machine is busy if tasks have waited for a processor in this share of the time.
const busyShare = 0.7

// maxBusy is the share of queries that may fail because the machine was busy.
const maxBusy = 0.001

// machineBusy is the name of the outage of forwarded queries while the machine was busy: the
// nameservers are in this process, and an agent that has no reply from any of them for a second
// answers SERVFAIL.
const machineBusy = "forwarded, while the machine was busy"

// watchPressure notes when the machine is busy. Without the kernel's pressure figures it never
// is.
func (w *world) watchPressure(ctx context.Context) {
	const interval = 500 * time.Millisecond
	last, at := waited(), time.Now()
	var busy span // the current one; zero if there is none
	end := func() {
		if !busy.from.IsZero() {
			w.timeline.add(outage{what: machineBusy, from: busy.from, until: busy.until, covers: forwardedFails})
			busy = span{}
		}
	}
	defer end()
	for clock.Sleep(ctx, interval) {
		total, now := waited(), time.Now()
		switch {
		case float64(total-last) > busyShare*float64(now.Sub(at)):
			if busy.from.IsZero() {
				busy.from = at.Add(-2 * interval)
			}
			busy.until = now.Add(2 * interval)
		case now.After(busy.until):
			end()
		}
		last, at = total, now
	}
}

// waited returns how long, since the boot, any task has waited for a processor.
func waited() time.Duration {
	text, err := os.ReadFile("/proc/pressure/cpu")
	if err != nil {
		return 0
	}
	_, total, _ := strings.Cut(strings.SplitN(string(text), "\n", 2)[0], "total=")
	micros, err := strconv.ParseInt(total, 10, 64)
	if err != nil {
		return 0
	}
	return time.Duration(micros) * time.Microsecond
}
