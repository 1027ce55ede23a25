package fleet

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

// jitter returns a random time below d.
func jitter(d time.Duration) time.Duration { return rand.N(d) }

// A gate lets goroutines pass while it is open.
type gate struct {
	mu     sync.Mutex
	opened chan struct{} // closed while the gate is open; nil means that it is closed
}

func (g *gate) current() chan struct{} {
	if g.opened == nil {
		g.opened = make(chan struct{})
	}
	return g.opened
}

// wait returns when the gate is open. It reports false if ctx has ended.
func (g *gate) wait(ctx context.Context) bool {
	g.mu.Lock()
	opened := g.current()
	g.mu.Unlock()
	select {
	case <-ctx.Done():
	case <-opened:
	}
	return ctx.Err() == nil
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.current():
	default:
		close(g.opened)
	}
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.opened = nil
}

// pauses stop some agents.
type pauses struct {
	mu       sync.Mutex
	from, to int           // the stopped agents have the numbers from, and below to
	ended    chan struct{} // nil if none is stopped
}

func (p *pauses) begin(from, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.from, p.to, p.ended = from, from+n, make(chan struct{})
}

func (p *pauses) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended != nil {
		close(p.ended)
	}
	p.ended = nil
}

// wait returns when an agent may go on.
func (p *pauses) wait(id int) {
	p.mu.Lock()
	ended := p.ended
	stopped := ended != nil && id >= p.from && id < p.to
	p.mu.Unlock()
	if stopped {
		<-ended
	}
}
