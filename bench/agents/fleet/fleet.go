// Package fleet plays many agents: each has a TCP connection and an ADS stream of its own, takes pushes
// and acknowledges them, and connects again when its stream ends.
//
// An agent of the mode Named knows the versions of its resources. Agents that take the same pushes share the tables of
// versions. Config.Full agents compare the version of each resource with its bytes; the other agents do not. So a push
// that is wrong for one agent is noticed only if this agent is a full agent.
package fleet

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/bench/agents/stream"
	"github.com/nametap/nametap/bench/agents/wire"
	"github.com/nametap/nametap/internal/clock"
)

// serviceAccount is the service account of all agents.
const serviceAccount = "default"

const (
	// dialTimeout bounds the connect and the TLS handshake, as in nametap's agent.
	dialTimeout = 10 * time.Second
	// opening is how many agents connect at a time at the start.
	opening = 32
	// sources is how many loopback addresses agents connect from. Each has 28,000 ports.
	sources = 8
)

// A Config describes a fleet.
type Config struct {
	Agents, Full int
	Mode         Mode
	Variant      wire.Variant
	Namespaces   []string                 // of the agents, in turns
	Servers      []string                 // addresses, which agents choose from at random
	TLS          func(string) *tls.Config // returns the configuration for a namespace; nil means plaintext
	Cold         bool                     // agents do not say which table they have
	Estimate     bool                     // agents estimate the bandwidth, as grpc-go does
	// Edited returns when a host was last edited; ok is false if it was not. It may be nil.
	Edited func(host string) (at time.Time, ok bool)
}

// A Fleet is a number of agents.
type Fleet struct {
	cfg    Config
	stream *stream.Config
	agents []*agent
	steps  *steps
	group  sync.WaitGroup
	end    context.CancelFunc

	gate   gate
	pauses pauses
	up     []atomic.Bool // servers that agents may choose
	round  atomic.Pointer[Round]

	delays  collected // from the edit of a host to its arrival at a full agent
	outages collected // from the end of a stream to the first push of the next one
}

// New returns a fleet without connections.
func New(cfg Config) *Fleet {
	scheme := "http"
	if cfg.TLS != nil {
		scheme = "https"
	}
	f := &Fleet{cfg: cfg, steps: newSteps(), up: make([]atomic.Bool, len(cfg.Servers))}
	f.stream = stream.NewConfig(scheme, "nametap-discovery", cfg.Variant.Method())
	f.stream.EstimateBandwidth = cfg.Estimate
	f.gate.open()
	for i := range f.up {
		f.up[i].Store(true)
	}
	for id := range cfg.Agents {
		f.agents = append(f.agents, &agent{fleet: f, id: id, full: id < cfg.Full, lost: time.Now()})
	}
	return f
}

// Start connects all agents, a few at a time, and returns when each has had a push. In the mode Named the first agent
// gets the whole table, and the others say that they have it, as agents do that start again. So Start takes no longer
// with many hosts. With Config.Cold, each agent gets the whole table.
func (f *Fleet) Start(ctx context.Context) error {
	ctx, f.end = context.WithCancel(ctx)
	for id, a := range f.agents {
		f.group.Go(func() { a.run(ctx) })
		wait := id - opening
		if id == 0 {
			wait = 0
		}
		if wait < 0 {
			continue
		}
		if err := f.agents[wait].await(ctx); err != nil {
			return err
		}
		if id == 0 {
			f.share()
		}
	}
	for _, a := range f.agents {
		if err := a.await(ctx); err != nil {
			return err
		}
	}
	return nil
}

// share gives the table of the first agent to all.
func (f *Fleet) share() {
	first := f.agents[0]
	first.mu.Lock()
	table := first.table
	first.mu.Unlock()
	for _, a := range f.agents[1:] {
		a.table = table
	}
}

// startLimit is how long an agent may take to get its first push.
const startLimit = 5 * time.Minute

// firstFailures is how many streams of the first agent may fail.
const firstFailures = 5

// await returns when the agent has had a push.
func (a *agent) await(ctx context.Context) error {
	limit := time.Now().Add(startLimit)
	for a.received.Load() == 0 {
		if !clock.Sleep(ctx, time.Millisecond) {
			return ctx.Err()
		}
		if time.Now().After(limit) || a.id == 0 && a.failures.Load() >= firstFailures {
			a.mu.Lock()
			defer a.mu.Unlock()
			return fmt.Errorf("agent %d has no table after %d streams: %s", a.id, a.failures.Load(), a.problem)
		}
	}
	return nil
}

// Stop ends all agents.
func (f *Fleet) Stop() {
	f.end()
	f.gate.open()
	f.pauses.end()
	f.Disconnect()
	f.group.Wait()
}

// Disconnect closes all connections.
func (f *Fleet) Disconnect() {
	for _, a := range f.agents {
		a.mu.Lock()
		if a.conn != nil {
			_ = a.conn.Close() // its agent notices
		}
		a.mu.Unlock()
	}
}

// Hold keeps agents from connecting until Release.
func (f *Fleet) Hold() { f.gate.close() }

// Release lets agents connect, all at once.
func (f *Fleet) Release() { f.gate.open() }

// SetUp sets whether agents may choose a server, like an endpoint of a Service that is ready or
// not.
func (f *Fleet) SetUp(server int, up bool) { f.up[server].Store(up) }

// Pause makes n agents stop reading after their next push. Full agents go on reading.
func (f *Fleet) Pause(n int) { f.pauses.begin(f.cfg.Full, n) }

// Resume ends Pause.
func (f *Fleet) Resume() { f.pauses.end() }

// pick returns the server for a new connection: a random one of the live servers, or of all.
func (f *Fleet) pick() int {
	var up []int
	for i := range f.up {
		if f.up[i].Load() {
			up = append(up, i)
		}
	}
	if len(up) == 0 {
		return rand.IntN(len(f.up))
	}
	return up[rand.IntN(len(up))]
}

// dial connects an agent to a server.
func (f *Fleet) dial(ctx context.Context, a *agent, server int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+a.id%sources))}, KeepAlive: -1}
	tcp, err := d.DialContext(ctx, "tcp4", f.cfg.Servers[server])
	if err != nil {
		return nil, err
	}
	counted := &countedConn{Conn: tcp, of: &a.counters}
	if f.cfg.TLS == nil {
		return counted, nil
	}
	conn := tls.Client(counted, f.cfg.TLS(a.namespace()))
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = tcp.Close() // the handshake has failed already
		return nil, err
	}
	return conn, nil
}

// A countedConn counts the bytes of an agent's connection.
type countedConn struct {
	net.Conn
	of *counters
}

// Read counts what it reads.
func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.of.read.Add(int64(n))
	return n, err
}

// Write counts what it writes.
func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.of.written.Add(int64(n))
	return n, err
}
