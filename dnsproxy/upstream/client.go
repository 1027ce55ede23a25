package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	// ErrNoServers says that a group has no servers.
	ErrNoServers = errors.New("no nameserver to ask")
	// ErrLoop says that the queries to a server come back to us.
	ErrLoop = errors.New("its queries come back to us")
	// ErrTimeout says that a server sent no reply in time.
	ErrTimeout = errors.New("no reply in time")
	// ErrMalformed says that a server's reply cannot be read.
	ErrMalformed = errors.New("its reply is malformed")
	// ErrCrowded says that too many sockets are open to servers that are not configured.
	ErrCrowded = errors.New("too many nameservers that are not configured are being asked")
	// ErrOverload says that no server replies and many queries wait already.
	ErrOverload = errors.New("no nameserver replies, and too many queries wait for them already")
)

// defaultTimeout is below the 5 s after which glibc gives a nameserver up.
const defaultTimeout = 4 * time.Second

// Config is what a Client works by. The zero Config is usable.
type Config struct {
	// Timeout ends every query; zero means 4 s.
	Timeout time.Duration
	// MixCase sends the letters of questions in random case over UDP.
	MixCase bool
	// Check reads a reply to a QUERY: its response code with all twelve bits, and whether
	// it says that there is nothing. A reply with an error is no answer. Nil reads headers
	// only.
	Check func(reply []byte) (rcode int, negative bool, err error)
	// TLSRoots are the authorities that TLS servers' certificates must come from;
	// nil means the system's.
	TLSRoots *x509.CertPool
	// TLSRootsFile is a PEM file with those authorities, which is read for every new
	// connection; empty means TLSRoots.
	TLSRootsFile string
	// Logger is told of servers that are down, loop, or are well again; nil means
	// nobody is.
	Logger *slog.Logger
	// Observe is called with the time of every reply, from several goroutines. It
	// must not block. Nil means that nobody wants to know.
	Observe func(server Spec, rtt time.Duration)
}

// Options are what resolv.conf(5) and settings say about a group of servers.
type Options struct {
	// Fastest prefers the servers that are fast to those that come first.
	Fastest bool
	// Rotate spreads queries over all servers that are about as fast as the fastest.
	Rotate bool
	// UseVC asks over TCP only.
	UseVC bool
	// Parallel asks all servers at once.
	Parallel bool
	// Timeout and Attempts are those of resolv.conf(5): together with the number of
	// servers they say when a query ends, if that is before Config.Timeout. If only
	// one is zero it has resolver(5)'s default, 5 s and 2.
	Timeout  time.Duration
	Attempts int
}

// Status is how a server is doing.
type Status struct {
	Spec  Spec
	State State
	RTT   time.Duration // smoothed; zero before the first reply

	Requests  uint64 // queries sent, repetitions, copies and probes included
	Failures  uint64 // of these, those that got no reply: time-outs and errors
	Wrong     uint64 // messages that were no reply to any query in flight
	Malformed uint64 // packets that were no DNS responses at all
	Hedges    uint64 // queries sent because a server was late

	LastError string // empty if there was none
}

// A Client asks nameservers. Its methods may be called from any goroutine.
type Client struct {
	config  Config
	context context.Context // of dialling; ends with Close
	cancel  context.CancelFunc
	tickets tls.ClientSessionCache

	attempts, exchanges, buffers, writes sync.Pool

	transfers     atomic.Int64 // under way
	open          atomic.Int64 // sockets and connections
	elsewhereOpen atomic.Int64 // of these, those to servers that are not configured
	goroutines    sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	sweeping  bool
	servers   map[Spec]*server
	elsewhere elsewhere
	probes    map[[probeLen]byte]*loopProbe
}

// NewClient returns a client. It uses no resources before it is asked something.
func NewClient(config Config) *Client {
	if config.Timeout <= 0 {
		config.Timeout = defaultTimeout
	}
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Client{
		config:    config,
		tickets:   tls.NewLRUClientSessionCache(0),
		servers:   make(map[Spec]*server),
		elsewhere: newElsewhere(),
		probes:    make(map[[probeLen]byte]*loopProbe),
	}
	c.context, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends all queries in flight with an error, closes the sockets, and returns
// after the client's goroutines have ended. Later queries fail.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	servers := c.allLocked()
	c.mu.Unlock()
	c.cancel()
	for _, s := range servers {
		s.close()
	}
	c.goroutines.Wait()
}

func (c *Client) serversLocked() []*server {
	servers := make([]*server, 0, len(c.servers))
	for _, s := range c.servers {
		servers = append(servers, s)
	}
	return servers
}

// allLocked returns the servers that were ever in a group, and those of Elsewhere.
func (c *Client) allLocked() []*server {
	return append(c.serversLocked(), c.elsewhere.servers()...)
}

// spawn runs f on a goroutine that Close waits for, unless the client is closed.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.goroutines.Go(f)
	return true
}

// sweepInterval is how often attempts and sockets are looked at for their age.
const sweepInterval = 250 * time.Millisecond

// sweep closes sockets until there are none.
func (c *Client) sweep() {
	ticker := time.NewTicker(sweepInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-c.context.Done():
			return
		}
		c.mu.Lock()
		if c.open.Load() == 0 {
			c.sweeping = false
			c.mu.Unlock()
			return
		}
		servers := c.allLocked()
		c.mu.Unlock()
		now := time.Now()
		for _, s := range servers {
			s.sweep(now)
		}
	}
}

// newServer returns a server without history.
func (c *Client) newServer(spec Spec) *server {
	s := &server{spec: spec, client: c}
	s.stream = newStreams(s)
	if !spec.TLS {
		s.udp = newUDPSockets(s)
	}
	return s
}

// Group returns the group of these servers, in order of preference. Servers keep
// their history from group to group; groups need no closing.
func (c *Client) Group(specs []Spec, opts Options) *Group {
	g := &Group{client: c, options: opts, timeout: c.config.Timeout}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, spec := range specs {
		s, known := c.servers[spec]
		if !known {
			s = c.newServer(spec)
			c.servers[spec] = s
		}
		if !slices.Contains(g.servers, s) {
			g.servers = append(g.servers, s)
		}
	}
	if total := opts.total(len(g.servers)); total > 0 {
		g.timeout = min(g.timeout, total)
	}
	return g
}

// total is how long resolv.conf(5) lets a query take, zero if it does not say.
func (o Options) total(servers int) time.Duration {
	const defaultTimeout, defaultAttempts = 5 * time.Second, 2
	if o.Timeout <= 0 && o.Attempts <= 0 {
		return 0
	}
	timeout, attempts := o.Timeout, o.Attempts
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	if attempts <= 0 {
		attempts = defaultAttempts
	}
	return timeout * time.Duration(attempts*servers)
}

// Status returns how each server is doing that was ever in a group, sorted by its
// text.
func (c *Client) Status() []Status {
	c.mu.Lock()
	servers := c.serversLocked()
	c.mu.Unlock()
	now := time.Now()
	all := make([]Status, 0, len(servers))
	for _, s := range servers {
		all = append(all, s.status(now))
	}
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(a.Spec.String(), b.Spec.String()) })
	return all
}

// cause returns the part of an error that says why, without the operation and the
// addresses that package net puts around it.
func cause(err error) error {
	var opError *net.OpError
	if errors.As(err, &opError) {
		if opError.Timeout() {
			return ErrTimeout
		}
		return opError.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return ErrTimeout
	}
	return err
}
