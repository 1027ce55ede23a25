package upstream

import (
	"context"
	"crypto/tls"
	"net"
	"sync"
	"sync/atomic"
)

// shared is the part of a [Client] that its servers use, too.
type shared struct {
	config  Config
	latest  atomic.Pointer[Config] // what Configure got last
	longest atomic.Int64           // the longest Timeout so far, in ns
	context context.Context        //nolint:containedctx // for dialling; ends with Close
	cancel  context.CancelFunc
	tickets tls.ClientSessionCache
	dialTCP func(ctx context.Context, dialer *net.Dialer, addr string) (net.Conn, error)

	buffers, writes sync.Pool

	open          atomic.Int64 // how many sockets and connections are open
	elsewhereOpen atomic.Int64 // how many sockets to servers that are not configured are open
	goroutines    sync.WaitGroup
	sweep         func() // the method sweep of the Client

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
