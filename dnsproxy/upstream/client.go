package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nametap/nametap/internal/clock"
)

var (
	// ErrNoServers is the error of a group without servers.
	ErrNoServers = errors.New("no nameserver to ask")
	// ErrLoop is the error of a server that forwards queries back to this agent.
	ErrLoop = errors.New("its queries come back to this agent")
	// ErrTimeout is the error of a server that sent no reply in time.
	ErrTimeout = errors.New("no reply in time")
	// ErrMalformed is the error of a server whose reply cannot be parsed.
	ErrMalformed = errors.New("its reply is malformed")
	// ErrCrowded is the error for a server that is not configured when too many sockets are
	// open to such servers.
	ErrCrowded = errors.New("queries for too many nameservers that are not configured are in flight")
	// ErrSilent is the error of a server that sends nothing and owes replies to many queries (rule 7).
	ErrSilent = errors.New("no sign of life, and many queries wait for it already")
)

// defaultTimeout is less than the 5 s after which glibc gives up on a nameserver.
const defaultTimeout = 4 * time.Second

// Config configures a Client. The zero Config is usable.
type Config struct {
	// Timeout ends every query; zero means 4 s.
	Timeout time.Duration
	// Check checks a reply to a QUERY. It returns the response code with all twelve bits, and
	// whether the reply is a negative answer. A reply for which it returns an error is not used.
	// If Check is nil only headers are read.
	//
	// A caller that parses the answer does so a second time, which costs about 50 ns of the 17 µs
	// of an exchange. A parsed reply cannot travel with the answer as it is, since the ID and
	// the question of the answer are restored later.
	Check func(reply []byte) (rcode int, negative bool, err error)
	// TLSRoots are the certificate authorities for TLS servers; nil means the system's.
	TLSRoots *x509.CertPool
	// TLSRootsFile is a PEM file with certificate authorities, which is read for every new
	// connection; if it is empty TLSRoots are used.
	TLSRootsFile string
	// Control is called for each socket before it is connected, as Control of net.Dialer is. It may
	// be nil.
	Control func(network, address string, conn syscall.RawConn) error
	// Clock tells the age of sockets; nil means clock.New().
	Clock *clock.Clock
	// Logger logs when a server is down or loops, and when it can be used again; nil logs
	// nothing.
	Logger *slog.Logger
	// Observe is called with the time that each reply took, from several goroutines. It
	// must not block. It may be nil.
	Observe func(server Spec, rtt time.Duration)
}

// Options tell how to ask a group of servers, as in resolv.conf(5) or flags.
type Options struct {
	// Fastest prefers fast servers over first ones.
	Fastest bool
	// UseVC asks over TCP only.
	UseVC bool
	// Timeout and Attempts are options of resolv.conf(5). A query ends after their
	// product times the number of servers, if that is less than Config.Timeout. If only
	// one of them is zero it has resolv.conf(5)'s default, 5 s or 2.
	Timeout  time.Duration
	Attempts int
}

// Status is the state of a server and what was counted for it.
type Status struct {
	Spec  Spec
	State State
	RTT   time.Duration // smoothed; zero before the first reply

	Requests  uint64 // queries sent, with repetitions and probes
	Failures  uint64 // queries without a reply: timeouts and errors
	Wrong     uint64 // responses that belong to no query in flight
	Malformed uint64 // packets that are not DNS responses, and replies that cannot be parsed
	Hedges    uint64 // queries sent because a server was late

	// Responses are replies to queries by response code: NOERROR, NXDOMAIN, SERVFAIL, REFUSED, NOTIMP and FORMERR,
	// and "other" for all others, since a nameserver could send each of 4,096. Replies to probes do not count.
	Responses map[string]uint64
	// Refusing is true if the last replies to queries, ten at least and for names of three domains,
	// were no answer. A query does not count if a server that answers other queries has failed for it
	// before.
	Refusing bool

	LastError   string // empty if there was none
	LastErrorAt time.Time
	Barred      bool // the last query could not be sent: a firewall of this host drops it (EPERM)

	// TCP says what became of queries over TCP, if the server is also queried over UDP.
	TCP TCPStatus
}

// A TCPStatus says since when queries over TCP have had no reply, and why. It is zero if the last one had one.
type TCPStatus struct {
	Since       time.Time
	LastError   string
	LastErrorAt time.Time
}

// A Client asks nameservers. It is safe for concurrent use.
type Client struct {
	config  Config
	latest  atomic.Pointer[Config] // of Configure
	longest atomic.Int64           // the longest Timeout so far, in ns
	context context.Context        // for dialling; ends with Close
	cancel  context.CancelFunc
	tickets tls.ClientSessionCache

	attempts, exchanges, packets, buffers, writes sync.Pool

	wheel wheel // the timers of exchanges

	transfers     atomic.Int64 // zone transfers that are running
	open          atomic.Int64 // sockets and connections
	lingering     atomic.Int64 // exchanges that were answered and are not over
	elsewhereOpen atomic.Int64 // open sockets to servers that are not configured
	goroutines    sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	sweeping  bool
	servers   map[Spec]*server
	elsewhere elsewhere
	probes    map[[probeLen]byte]*loopProbe
}

// NewClient returns a client. It uses no resources before the first query.
func NewClient(config Config) *Client {
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	if config.Clock == nil {
		config.Clock = clock.New()
	}
	c := &Client{
		config:    config,
		tickets:   tls.NewLRUClientSessionCache(0),
		servers:   make(map[Spec]*server),
		elsewhere: newElsewhere(),
		probes:    make(map[[probeLen]byte]*loopProbe),
	}
	c.Configure(config)
	c.context, c.cancel = context.WithCancel(context.Background())
	return c
}

// Configure changes the Timeout and TLSRootsFile of the client, and ignores the other fields of
// config. A [Group] keeps the timeout with which it was made. It must not be called concurrently.
func (c *Client) Configure(config Config) {
	if config.Timeout <= 0 {
		config.Timeout = defaultTimeout
	}
	c.longest.Store(max(c.longest.Load(), int64(config.Timeout)))
	c.latest.Store(&config)
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

// allLocked returns the servers that were ever in a group, and the servers of Elsewhere.
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

// sweepInterval is how often attempts and sockets are checked for their age.
const sweepInterval = 250 * time.Millisecond

// sweep sweeps all servers until no socket is open and no server owes replies.
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
		servers := c.allLocked()
		c.mu.Unlock()
		now, owe := time.Now(), false
		for _, s := range servers {
			owe = s.sweep(now) || owe
		}
		c.mu.Lock()
		c.sweeping = owe || c.open.Load() > 0
		done := !c.sweeping
		c.mu.Unlock()
		if done {
			return
		}
	}
}

// newServer returns a server without history.
func (c *Client) newServer(spec Spec) *server {
	s := &server{spec: spec, name: spec.String(), client: c}
	s.stream = newStreams(s)
	if !spec.TLS {
		s.udp = newUDPSockets(s)
	}
	return s
}

// Group returns the group of these servers, in order of preference. A server has one
// history, whatever groups it is in. Groups need not be closed.
func (c *Client) Group(specs []Spec, opts Options) *Group {
	g := &Group{client: c, options: opts, timeout: c.latest.Load().Timeout}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, spec := range specs {
		s, known := c.servers[spec]
		if !known {
			s = c.newServer(spec)
			c.servers[spec] = s
		}
		if !slices.Contains(g.servers, s) {
			s.follow(opts)
			g.servers = append(g.servers, s)
		}
	}
	if total := opts.total(len(g.servers)); total > 0 {
		g.timeout = min(g.timeout, total)
	}
	return g
}

// total returns how long a query may take by resolv.conf(5), zero if it has no bound.
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

// Status returns the status of each server that was ever in a group, sorted by
// [Spec.String].
func (c *Client) Status() []Status {
	c.mu.Lock()
	servers := c.serversLocked()
	c.mu.Unlock()
	now := time.Now()
	all := make([]Status, 0, len(servers))
	for _, s := range servers {
		all = append(all, s.status(now))
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Spec.String() < all[j].Spec.String() })
	return all
}

// cause returns the reason in an error, without the operation and the addresses that
// package net puts around it.
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

// A Group is a list of servers that know the same names. It is safe for concurrent use.
type Group struct {
	client  *Client
	servers []*server
	options Options
	timeout time.Duration

	budget budget
}

// Down reports whether all servers are down or looping (rule 2).
func (g *Group) Down() bool {
	now := time.Now()
	for _, s := range g.servers {
		if s.standing(now).state < Down {
			return false
		}
	}
	return true
}

// Full reports whether a query would fail with [ErrSilent] at the moment (rule 7).
func (g *Group) Full() bool {
	now := time.Now()
	for _, s := range g.servers {
		if !s.refusesAll(now) {
			return false
		}
	}
	return len(g.servers) > 0
}
