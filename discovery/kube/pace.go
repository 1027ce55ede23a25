package kube

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// writeTimeout bounds one request that writes an object.
const writeTimeout = 10 * time.Second

// recheck bounds how long keepUp waits between two calls of its function step, because clocks jump and machines are
// suspended.
const recheck = time.Hour

// retry returns the pauses between failed requests: 0.5 s at first, and at most about 3 s. So the source has caught up
// five seconds after the API server is back.
func retry() *wait.Backoff {
	return &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 100, Cap: 2500 * time.Millisecond}
}

// keepUp calls the function step until ctx ends. It calls step after each change, and when the time that the last call
// has returned is over. After an error, it waits less. It calls logResult with the error of each call, which may be
// nil.
func keepUp(ctx context.Context, changed <-chan struct{}, step func(context.Context) (next time.Duration, err error), logResult func(error)) {
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
		next, err := step(ctx)
		if ctx.Err() != nil {
			return
		}
		logResult(err)
		if err != nil {
			timer.Reset(min(next, backoff.Step()))
			continue
		}
		backoff = retry()
		timer.Reset(next)
	}
}

const (
	// restores is how often an object is restored without a pause. If another program goes on writing the object,
	// the pauses then grow from a second to maxPause.
	restores = 10
	maxPause = 5 * time.Minute
	// Another program counts as writing an object until the object has stayed unchanged for two pauses and quietTime.
	quietTime = time.Minute
)

// A pace decides when to write an object that another program may write, too. The zero value is for an
// object that was not written.
type pace struct {
	written  string    // the text that was written last
	restored int       // how often it was written without quietTime in between
	last     time.Time // when it was written last
}

// left returns how long to wait before text is written. It is 0 or less if text can be written now. A text that differs
// from the last one can always be written.
func (p *pace) left(text string) time.Duration {
	if text != p.written {
		return 0
	}
	return time.Until(p.last.Add(p.pause()))
}

// pause returns the time that must pass between two writes of the same text.
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

// untilQuiet returns how long it takes until no other program counts as writing the object.
func (p *pace) untilQuiet() time.Duration { return time.Until(p.last.Add(quietTime + 2*p.pause())) }

// disputed reports whether another program counts as writing the object.
func (p *pace) disputed() bool { return p.restored > restores && p.untilQuiet() > 0 }

// count counts a write of text.
func (p *pace) count(text string) {
	if text != p.written || p.untilQuiet() < 0 {
		p.written, p.restored = text, 0
	}
	p.restored, p.last = p.restored+1, time.Now()
}
