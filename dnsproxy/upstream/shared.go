package upstream

import (
	"crypto/tls"
	"sync"
	"time"
)

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

// maxPooled is the capacity in bytes beyond which packets, and attempts with them, are not returned to their
// pools.
const maxPooled = 4 << 10

// newAttempt returns an attempt from the pool.
func (c *Client) newAttempt(s *server) *attempt {
	a, ok := c.attempts.Get().(*attempt)
	if !ok {
		a = new(attempt)
	}
	*a = attempt{server: s, question: a.question[:0], packet: a.packet[:0]}
	return a
}

// takePacket returns a copy of a query, until keepPacket.
func (c *Client) takePacket(query []byte) *[]byte {
	buffer, ok := c.packets.Get().(*[]byte)
	if !ok {
		buffer = new([]byte)
	}
	*buffer = append((*buffer)[:0], query...)
	return buffer
}

// keepPacket ends what takePacket began.
func (c *Client) keepPacket(buffer *[]byte) {
	if cap(*buffer) <= maxPooled {
		c.packets.Put(buffer)
	}
}

// tlsConfig returns the configuration for a connection to a TLS server.
func (c *Client) tlsConfig(spec Spec) (*tls.Config, error) {
	config := &tls.Config{
		MinVersion: tls.VersionTLS12, ServerName: spec.ServerName, RootCAs: c.config.TLSRoots,
		ClientSessionCache: c.tickets,
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

// addProbe remembers a probe, and forgets probes that no server will answer any more.
func (c *Client) addProbe(probe *loopProbe) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, old := range c.probes {
		if probe.sent.Sub(old.sent) > probeForgets {
			delete(c.probes, id)
		}
	}
	c.probes[probe.id] = probe
}

// probeAnswered is called when a probe has a reply, and reports whether the reply is the
// server's: the agent itself replies to a probe that was redirected to it.
func (c *Client) probeAnswered(probe *loopProbe) bool {
	c.mu.Lock()
	echoed, redirected := probe.echoed, probe.redirected
	c.mu.Unlock()
	if !echoed {
		probe.server.setLooping(false, "")
	}
	return !redirected
}

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
