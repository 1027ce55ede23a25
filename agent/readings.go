package agent

import (
	"context"
	"time"
)

// A reading is the part of the status that comes from outside the process: from iptables and
// test queries.
type reading struct {
	silent           []string
	capture          *CaptureStatus
	onlyNameserverOf string
	redirected       []Redirection
}

// readingAge is how long a reading is kept.
const readingAge = time.Second

// readings takes one reading at a time. All requests that wait share the reading, and so do requests in
// the next second. So the cost does not grow with the number of requests.
type readings struct {
	take    func(ctx context.Context) reading
	waiting chan chan<- reading
}

func newReadings(take func(ctx context.Context) reading) *readings {
	return &readings{take: take, waiting: make(chan chan<- reading)}
}

// run gives readings to requests until ctx ends.
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

// current returns a reading that is at most readingAge old, or takes a new one. It returns an error
// if ctx ends first.
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

// read takes a reading for c.
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
