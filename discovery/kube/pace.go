package kube

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// writeTimeout bounds one request that writes an object.
const writeTimeout = 10 * time.Second

// recheck bounds how long an object that is kept is not looked at, since clocks jump and machines
// are suspended.
const recheck = time.Hour

// retry is how long a failed request waits before the next one: 0.5 s at first, and at most about
// 3 s, so that the source has caught up 5 s after the API server is back.
func retry() *wait.Backoff {
	return &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 100, Cap: 2500 * time.Millisecond}
}

// keepUp calls pass after each change, and when next has passed since the last call, until ctx ends. After an error it
// calls pass again earlier. note gets the error of each call, which may be nil.
func keepUp(ctx context.Context, changed <-chan struct{}, pass func(context.Context) (next time.Duration, err error), note func(error)) {
	backoff := retry()
	timer := time.NewTimer(recheck)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-timer.C:
		}
		next, err := pass(ctx)
		if ctx.Err() != nil {
			return
		}
		note(err)
		if err != nil {
			timer.Reset(min(next, backoff.Step()))
			continue
		}
		backoff = retry()
		timer.Reset(next)
	}
}

const (
	// restores is how often an object is restored at once. While another program writes it again and again,
	// the pauses then grow from a second to maxPause.
	restores = 10
	maxPause = 5 * time.Minute
	// calm is how long an object stays as it is when no other program writes it.
	calm = time.Minute
)

// A pace says when to write an object that another program may write, too. The zero value is for an
// object that was not written.
type pace struct {
	written  string    // what was written last
	restored int       // how often that was written without calm between
	last     time.Time // when it was written last
}

// left returns how long to wait before a text is written: not at all if the text has changed.
func (p *pace) left(text string) time.Duration {
	if text != p.written {
		return 0
	}
	return time.Until(p.last.Add(p.pause()))
}

// pause returns the time between two writes.
func (p *pace) pause() time.Duration {
	doublings := p.restored - restores
	switch {
	case doublings < 0:
		return 0
	case doublings > 9:
		return maxPause
	}
	return min(maxPause, time.Second<<doublings)
}

// untilCalm returns how long it takes until no other program counts as writing the object.
func (p *pace) untilCalm() time.Duration { return time.Until(p.last.Add(calm + 2*p.pause())) }

// disputed reports whether another program counts as writing the object.
func (p *pace) disputed() bool { return p.restored > restores && p.untilCalm() > 0 }

// count counts a write of a text.
func (p *pace) count(text string) {
	if text != p.written || p.untilCalm() < 0 {
		p.written, p.restored = text, 0
	}
	p.restored, p.last = p.restored+1, time.Now()
}
