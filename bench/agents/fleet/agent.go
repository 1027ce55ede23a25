package fleet

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/internal/clock"

	"github.com/nametap/nametap/bench/agents/stream"
	"github.com/nametap/nametap/bench/agents/wire"
)

// An agent is a simulated agent. Its goroutine owns the fields of the first group.
type agent struct {
	fleet   *Fleet
	id      int
	full    bool // it applies every change itself
	parsed  wire.Response
	skimmer wire.Skimmer
	version []byte
	answer  []byte // is reused
	pushes  int    // on this stream

	counters

	mu      sync.Mutex
	conn    net.Conn          // nil while there is none
	server  int               // to which conn leads
	table   *table            // nil before the first push, and in other modes than Named
	raw     map[string][]byte // the resources of a full agent in other modes than Named, by name
	pushed  time.Time         // when the last push was received
	lost    time.Time         // when the last stream ended; zero while there is one
	problem string            // of the last stream
}

// counters count what an agent does.
type counters struct {
	read, written atomic.Int64 // bytes of the connections
	received      atomic.Int64 // pushes
	streams       atomic.Int64 // streams that had a push
	failures      atomic.Int64 // streams that ended without a push
	rejected      atomic.Int64 // pushes with a wrong version
}

// run keeps a stream open until ctx ends.
func (a *agent) run(ctx context.Context) {
	const firstPause, longestPause = 100 * time.Millisecond, 10 * time.Second
	pause := firstPause
	for {
		if !a.fleet.gate.wait(ctx) {
			return
		}
		err := a.connect(ctx)
		if a.lose(err); ctx.Err() != nil {
			return
		}
		if a.pushes > 0 {
			pause = firstPause
			continue
		}
		a.failures.Add(1)
		if !clock.Sleep(ctx, pause/2+jitter(pause)) {
			return
		}
		pause = min(2*pause, longestPause)
	}
}

// lose notes the end of a stream.
func (a *agent) lose(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.conn != nil {
		_ = a.conn.Close() // it has ended
	}
	a.conn = nil
	a.problem = err.Error()
	if a.lost.IsZero() {
		a.lost = time.Now()
	}
}

// connect opens a stream and receives pushes until it ends.
func (a *agent) connect(ctx context.Context) error {
	a.pushes, a.version = 0, nil
	server := a.fleet.pick()
	conn, err := a.fleet.dial(ctx, a, server)
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.conn, a.server = conn, server
	a.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	first, err := a.fleet.cfg.Variant.First(a.node(), a.announce())
	if err != nil {
		return err
	}
	s, err := stream.Open(conn, a.fleet.stream, first)
	if err == nil && !a.full {
		a.skimmer = wire.Skimmer{Variant: a.fleet.cfg.Variant}
		s.Skim = a.skimmer.Part
	}
	for err == nil {
		var message []byte
		if message, err = s.Receive(); err == nil {
			err = a.push(s, message)
		}
	}
	return err
}

// push takes a push, and answers it.
func (a *agent) push(s *stream.Stream, message []byte) error {
	now := time.Now()
	variant := a.fleet.cfg.Variant
	var err error
	if len(message) == 0 { // it was skimmed
		err = a.skimmer.Parse(&a.parsed)
	} else {
		err = variant.Parse(message, &a.parsed)
	}
	if err != nil {
		return err
	}
	wrong := a.take(now)
	reason := ""
	if wrong != nil {
		a.rejected.Add(1)
		reason = wrong.Error()
	} else {
		a.version = append(a.version[:0], a.parsed.Version...)
	}
	a.answer = variant.AppendAnswer(a.answer[:0], a.version, a.parsed.Nonce, reason)
	err = s.Send(a.answer)
	if wrong != nil {
		return errors.Join(wrong, err)
	}
	if a.pushes++; a.pushes == 1 {
		a.streams.Add(1)
	}
	a.received.Add(1)
	a.fleet.notePush(a, now)
	a.fleet.pauses.wait(a.id)
	return err
}

// take applies the resources of a push.
func (a *agent) take(now time.Time) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lost.IsZero() {
		a.fleet.outages.add(now.Sub(a.lost))
	}
	a.pushed, a.lost = now, time.Time{}
	if a.fleet.cfg.Mode != Named {
		a.keepLocked()
		return nil
	}
	before := a.table
	if before == nil {
		before = newTable()
	}
	for _, r := range a.parsed.Resources {
		if r.Name == "" {
			return fmt.Errorf("a table of %d bytes without a name: this control plane does not know the mode %q", len(r.Table), Named)
		}
	}
	next, err := a.fleet.steps.apply(before, &a.parsed, a.full)
	if err == nil {
		a.table = next
	}
	return err
}

// keepLocked keeps the resources of a full agent.
func (a *agent) keepLocked() {
	if !a.full {
		return
	}
	if a.raw == nil {
		a.raw = map[string][]byte{}
	}
	if a.fleet.cfg.Variant == wire.StateOfTheWorld {
		clear(a.raw)
	}
	for _, r := range a.parsed.Resources {
		a.raw[r.Name] = bytes.Clone(r.Table)
	}
	for _, name := range a.parsed.Removed {
		delete(a.raw, name)
	}
}

// digest returns the digest of the agent's table. ok is false if it has none.
func (a *agent) digest() (digest string, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fleet.cfg.Mode == Named {
		if a.table == nil {
			return "", false
		}
		return a.table.digest(), true
	}
	var entries []string
	for _, table := range a.raw {
		ok = true
		_ = wire.Entries(table, func(_ string, raw []byte) { entries = append(entries, string(raw)) }) // what is malformed has another digest
	}
	slices.Sort(entries)
	sum := sha256.Sum256([]byte(strings.Join(entries, "")))
	return hex.EncodeToString(sum[:]), ok
}

// announce returns what the agent tells of its table when it connects.
func (a *agent) announce() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.table == nil || a.fleet.cfg.Cold {
		return nil
	}
	return a.table.announce()
}
