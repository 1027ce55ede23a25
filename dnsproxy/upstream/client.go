package upstream

import (
	"context"
	"crypto/tls"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/nametap/nametap/internal/clock"
)

// A Client asks nameservers. It is safe for concurrent use.
type Client struct {
	config  Config
	latest  atomic.Pointer[Config] // what Configure got last
	context context.Context        //nolint:containedctx // for dialling; ends with Close
	cancel  context.CancelFunc
	tickets tls.ClientSessionCache
	dialTCP func(ctx context.Context, network, addr string) (net.Conn, error)

	buffers       sync.Pool    // of *[dns.MaxMsgSize]byte
	writes        sync.Pool    // of *udpWrite
	alarms        sync.Pool    // of *alarm
	open          atomic.Int64 // how many sockets and connections are open
	elsewhereOpen atomic.Int64 // how many sockets to servers that are not configured are open
	transfers     atomic.Int64 // how many zone transfers are running
	goroutines    sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	sweeping  bool
	servers   map[Spec]*server
	elsewhere *simplelru.LRU[netip.AddrPort, *server] // the servers of Elsewhere that are not in servers
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
		config: config, tickets: tls.NewLRUClientSessionCache(0), servers: make(map[Spec]*server),
		probes: make(map[[probeLen]byte]*loopProbe),
	}
	c.elsewhere, _ = simplelru.NewLRU[netip.AddrPort, *server](maxElsewhere, nil) // fails only for a size below 1
	c.dialTCP = (&net.Dialer{Control: config.Control}).DialContext
	c.Configure(config)
	c.context, c.cancel = context.WithCancel(context.Background())
	return c
}

// Configure changes the Timeout and TLSRootsFile of the client, and ignores the other fields of
// config. A [Group] keeps the timeout with which it was made. Configure must not be called concurrently.
func (c *Client) Configure(config Config) {
	if config.Timeout <= 0 {
		config.Timeout = defaultTimeout
	}
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

// newServer returns a server without history.
func (c *Client) newServer(spec Spec) *server {
	s := &server{spec: spec, name: spec.String(), client: c}
	s.known.Responses = map[string]uint64{"NOERROR": 0, "NXDOMAIN": 0, "SERVFAIL": 0} // of others once they come
	connections, udp := new(streams), new(udpSockets)
	connections.server, connections.choose = s, connections.chooseLocked
	udp.server, udp.choose = s, udp.chooseLocked
	if s.stream = connections; !spec.TLS {
		s.udp = udp
	}
	return s
}

// allLocked returns the servers that were ever in a group, and the servers of Elsewhere.
func (c *Client) allLocked() []*server {
	return slices.AppendSeq(c.elsewhere.Values(), maps.Values(c.servers))
}

// Status returns the status of each server that was ever in a group, sorted by
// [Spec.String].
func (c *Client) Status() []Status {
	c.mu.Lock()
	servers := slices.Collect(maps.Values(c.servers))
	c.mu.Unlock()
	now := time.Now()
	all := make([]Status, 0, len(servers))
	for _, s := range servers {
		all = append(all, s.status(now))
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Spec.String() < all[j].Spec.String() })
	return all
}

// Ask sends each of these servers a question that it answers itself, and again if there is no reply. It returns when all
// have replied or have had three questions and 2 s, or when ctx ends. Status then has what was found out. Ask is for a
// person who wants to know now: queries of clients need no such question.
func (c *Client) Ask(ctx context.Context, specs []Spec) {
	var asking sync.WaitGroup
	defer asking.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, spec := range specs {
		if s := c.servers[spec]; s != nil && !c.closed {
			asking.Go(func() { s.ask(ctx) })
		}
	}
}

// sweepInterval is how often attempts and sockets are checked for their age.
const sweepInterval = 250 * time.Millisecond

// sweep sweeps all servers until no socket is open and no server needs to be probed.
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

// A Group is a list of servers that know the same names. It is safe for concurrent use.
type Group struct {
	client  *Client
	servers []*server
	options Options
	timeout time.Duration
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
			s.mu.Lock()
			s.options = opts
			s.mu.Unlock()
			g.servers = append(g.servers, s)
		}
	}
	if total := opts.total(len(g.servers)); total > 0 {
		g.timeout = min(g.timeout, total)
	}
	return g
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
		if !s.full(now) {
			return false
		}
	}
	return len(g.servers) > 0
}

// Bounds for servers that are asked although they are not configured. Clients choose these servers, and may choose any
// number of them.
const (
	// maxElsewhere is how many such servers are remembered.
	maxElsewhere = 256
	// maxElsewhereSockets bounds the sockets to all of them. Each costs a descriptor and one or two goroutines.
	maxElsewhereSockets = 512
)

// Elsewhere returns a group with one server, at an address that a client of the agent chose. If the
// server was ever in a group of [Client.Group], it keeps its history. All other servers, and their sockets, are bounded
// in number: the server that was asked least recently is evicted, and queries to it fail with [ErrCrowded].
// [Client.Status] leaves these servers out.
func (c *Client) Elsewhere(addr netip.AddrPort) *Group {
	c.mu.Lock()
	s := c.servers[Spec{Addr: addr}]
	if s == nil {
		s, _ = c.elsewhere.Get(addr)
	}
	if s == nil {
		if c.elsewhere.Len() == maxElsewhere {
			_, evicted, _ := c.elsewhere.RemoveOldest()
			evicted.evicted.Store(true)
			defer evicted.close() // not with mu held: it waits for sockets that are being opened
		}
		s = c.newServer(Spec{Addr: addr})
		s.elsewhere = true
		c.elsewhere.Add(addr, s)
	}
	if s.single == nil {
		s.single = &Group{client: c, servers: []*server{s}, timeout: c.latest.Load().Timeout}
	}
	group := s.single
	c.mu.Unlock()
	return group
}
