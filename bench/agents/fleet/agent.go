package fleet

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/api/digest"
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

	mu       sync.Mutex
	conn     net.Conn   // nil while there is none
	server   int        // to which conn leads
	table    *table     // nil before the first change, and in other modes
	current  digest.Sum // the checksum after the last change; table has it, unless that table is not known
	revision []byte
	raw      map[string][]byte // the resources of a full agent in other modes than Hosts, by name
	pushed   time.Time         // when the last push was received
	lost     time.Time         // when the last stream ended; zero while there is one
	problem  string            // of the last stream
}

// counters count what an agent does.
type counters struct {
	read, written atomic.Int64 // bytes of the connections
	received      atomic.Int64 // pushes
	streams       atomic.Int64 // streams that had a push
	failures      atomic.Int64 // streams that ended without a push
	rejected      atomic.Int64 // changes with a wrong checksum
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
	first, err := a.fleet.cfg.Variant.First(a.node())
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
	skimmed := len(message) == 0
	if skimmed {
		err = a.skimmer.Parse(&a.parsed)
	} else {
		err = variant.Parse(message, &a.parsed)
	}
	if err != nil {
		return err
	}
	wrong := a.take(now, skimmed)
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

// take applies the resources of a push. A skimmed push lacks the entries.
func (a *agent) take(now time.Time, skimmed bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.lost.IsZero() {
		a.fleet.outages.add(now.Sub(a.lost))
	}
	a.pushed, a.lost = now, time.Time{}
	if a.fleet.cfg.Mode != Hosts {
		a.keepLocked()
		return nil
	}
	for _, r := range a.parsed.Resources {
		c, ok, err := wire.ParseChange(r.Table)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("a table of %d bytes without a change: this control plane does not know the mode %q", len(r.Table), Hosts)
		}
		if err := a.applyLocked(r.Table, c, skimmed); err != nil {
			return err
		}
		a.revision = append(a.revision[:0], c.Revision...)
	}
	return nil
}

// applyLocked applies a change. If another agent has a table with the checksum of the change, an agent that is not full
// takes that table. If the entries are missing, or the table that they change is not known, such an agent keeps its
// previous table beside the new checksum. When it connects again, it reports the previous table as its own, like an
// agent that has restarted with a snapshot.
func (a *agent) applyLocked(raw []byte, c wire.Change, skimmed bool) error {
	before := a.table
	if before == nil {
		before = newTable()
	}
	known, current := a.fleet.tables.get(c.Sum), a.current == before.sum
	a.current = c.Sum
	if !a.full && (known != nil || skimmed || !current) {
		if known != nil {
			a.table = known
		}
		return nil
	}
	next, err := before.apply(raw, c)
	if err != nil {
		return err
	}
	a.table = a.fleet.tables.add(next)
	return nil
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

// sum returns the checksum of the agent's table. ok is false if it has none.
func (a *agent) sum() (sum digest.Sum, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fleet.cfg.Mode == Hosts {
		return a.current, !a.pushed.IsZero()
	}
	for _, table := range a.raw {
		ok = true
		_ = wire.Entries(table, func(_ string, raw []byte) { sum = sum.Add(digest.Of(raw)) }) // what is malformed has another sum
	}
	return sum, ok
}

// state returns what the agent tells of its table when it connects.
func (a *agent) state() (digests, revision string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.table == nil || a.fleet.cfg.Cold {
		return "", ""
	}
	return a.table.digests(), base64.StdEncoding.EncodeToString(a.revision)
}
