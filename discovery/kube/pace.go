package kube

import "time"

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
