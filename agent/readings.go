package agent

import (
	"context"
	"time"
)

// A reading is the part of the status that is read from outside the process: it runs iptables and
// sends test queries.
type reading struct {
	silent           []string
	capture          *CaptureStatus
	onlyNameserverOf string
	redirected       []Redirection
}

// readingAge is how long a reading is kept.
const readingAge = time.Second

// readings takes one reading at a time. All requests that wait share it, and so do requests in
// the next second, so that requests cost the same however many there are.
type readings struct {
	take    func(ctx context.Context) reading
	waiting chan chan<- reading
}

func newReadings(take func(ctx context.Context) reading) *readings {
	return &readings{take: take, waiting: make(chan chan<- reading)}
}

// run answers the requests until ctx ends.
func (r *readings) run(ctx context.Context) {
	var kept reading
	var taken time.Time
	for {
		var answer chan<- reading
		select {
		case answer = <-r.waiting:
		case <-ctx.Done():
			return
		}
		if taken.IsZero() || time.Since(taken) >= readingAge {
			kept, taken = r.take(ctx), time.Now()
		}
		answer <- kept
	}
}

// current returns a reading that is at most readingAge old, or began after the request. It fails
// if ctx ends before.
func (r *readings) current(ctx context.Context) (reading, error) {
	answer := make(chan reading, 1)
	select {
	case r.waiting <- answer:
	case <-ctx.Done():
		return reading{}, ctx.Err()
	}
	select {
	case found := <-answer:
		return found, nil
	case <-ctx.Done():
		return reading{}, ctx.Err()
	}
}

// read takes a reading.
func read(ctx context.Context, c *core) reading {
	found := reading{silent: silent(ctx, c.proxy.Addrs())}
	if c.capture != nil {
		found.capture = c.capture.status(ctx)
		return found
	}
	found.onlyNameserverOf = OnlyNameserverOf(c.config.DNS.Forward.ResolvConf, addrPorts(c.proxy))
	if found.onlyNameserverOf == "" {
		found.redirected = Redirections(ctx, listening(c.proxy))
	}
	return found
}
