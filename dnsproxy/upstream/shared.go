package upstream

import (
	"context"
	"crypto/tls"
	"sync"
	"sync/atomic"
	"time"
)

// shared has what a [Client] and its servers share.
type shared struct {
	config  Config
	latest  atomic.Pointer[Config] // of the last Configure
	longest atomic.Int64           // the longest Timeout so far, in ns
	context context.Context        //nolint:containedctx // for dialling; ends with Close
	cancel  context.CancelFunc
	tickets tls.ClientSessionCache

	attempts, exchanges, packets, buffers, writes sync.Pool

	wheel wheel // the timers of exchanges

	open          atomic.Int64 // sockets and connections
	lingering     atomic.Int64 // exchanges that were answered and are not over
	elsewhereOpen atomic.Int64 // open sockets to servers that are not configured
	elsewhereLog  limitedLog   // lines about these servers
	goroutines    sync.WaitGroup
	sweep         func() // sweeps all servers until no socket is open and no server owes replies

	mu       sync.Mutex
	closed   bool
	sweeping bool
	probes   map[[probeLen]byte]*loopProbe
}

// spawn runs f on a goroutine that Close waits for, unless the client is closed.
func (c *shared) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.goroutines.Go(f)
	return true
}

// maxPooled is the capacity in bytes beyond which packets, and attempts with them, are not returned to their
// pools.
const maxPooled = 4 << 10

// takePacket returns a copy of a query, in memory of the pool. The caller must call keepPacket.
func (c *shared) takePacket(query []byte) *[]byte {
	buffer, ok := c.packets.Get().(*[]byte)
	if !ok {
		buffer = new([]byte)
	}
	*buffer = append((*buffer)[:0], query...)
	return buffer
}

// keepPacket returns the memory of a packet to the pool.
func (c *shared) keepPacket(buffer *[]byte) {
	if cap(*buffer) <= maxPooled {
		c.packets.Put(buffer)
	}
}

// tlsConfig returns the configuration for a connection to a TLS server.
func (c *shared) tlsConfig(spec Spec) (*tls.Config, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: spec.ServerName, ClientSessionCache: c.tickets,
	}
	if config.ServerName == "" {
		config.ServerName = spec.Addr.Addr().WithZone("").String()
	}
	if path := c.latest.Load().TLSRootsFile; path != "" {
		var err error
		if config.RootCAs, err = ReadRoots(path); err != nil {
			return nil, err
		}
	}
	return config, nil
}

// elsewhereLogPause is the least time between lines in the log about servers that are not configured.
const elsewhereLogPause = time.Second

// A limitedLog bounds the number of lines in the log.
type limitedLog struct {
	mu         sync.Mutex
	last       time.Time // when a line was logged
	suppressed int       // lines since then
}

// due reports whether a line is to be logged now, and how many were suppressed before.
func (l *limitedLog) due(now time.Time) (suppressed int, due bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if now.Sub(l.last) < elsewhereLogPause {
		l.suppressed++
		return 0, false
	}
	suppressed, l.last, l.suppressed = l.suppressed, now, 0
	return suppressed, true
}
