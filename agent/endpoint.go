package agent

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/logonce"

	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/sockets"
)

// maxStatusConns is the largest number of connections to an endpoint. Every host that reaches this host
// can connect to the status address.
const maxStatusConns = 64

// statusGrace is how long requests in flight may take at the end.
const statusGrace = time.Second

// An endpoint is a part of the status server with its own listener. If the listener cannot be opened, or fails, run
// opens it again: DNS does not need the endpoint, so the agent goes on without it.
type endpoint struct {
	what    string // in the log
	handler http.Handler
	listen  func(ctx context.Context) (net.Listener, error)
	peers   bool // the users of clients are checked: see peersOnly
	log     *slog.Logger

	mu       sync.Mutex
	listener net.Listener // nil while it is not open
	err      error        // why it is not open
	logged   logonce.Failure
}

// use sets the listener.
func (e *endpoint) use(listener net.Listener) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.listener, e.err = listener, nil
	e.logged.Forget()
}

// open opens the listener.
func (e *endpoint) open(ctx context.Context) error {
	listener, err := e.listen(ctx)
	if err != nil {
		e.fail(err)
		return err
	}
	e.use(listener)
	return nil
}

// fail records why the endpoint is not open, and logs a reason that differs from the last one.
func (e *endpoint) fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.logged.Differs(err) {
		e.log.Warn("degraded: "+e.what+" is not served; retrying", "error", err)
	}
	e.listener, e.err = nil, err
}

// failure returns why the endpoint is not open, nil if it is.
func (e *endpoint) failure() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// opened returns the listener, nil while it is not open.
func (e *endpoint) opened() net.Listener {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.listener
}

// addr returns the address of the listener, "" while it is not open.
func (e *endpoint) addr() string {
	if listener := e.opened(); listener != nil {
		return listener.Addr().String()
	}
	return ""
}

// run serves until ctx ends and the requests in flight are done. While the listener is not open, run tries to open
// it.
func (e *endpoint) run(ctx context.Context) {
	for ctx.Err() == nil {
		if e.opened() == nil {
			if !sockets.Retry(ctx, func() error { return e.open(ctx) }) {
				return
			}
			e.log.Info(e.what+" is served now", "listener", e.addr())
		}
		if err := e.serve(ctx); err != nil {
			e.fail(err)
		}
	}
}

// serve serves the listener. It returns nil when ctx has ended and the requests in flight are done, and an error when
// the listener fails.
func (e *endpoint) serve(ctx context.Context) error {
	server, listener := httpguard.New(e.handler, e.opened(), maxStatusConns, e.log)
	if e.peers {
		server.ConnContext = notePeer
	}
	return httpguard.Serve(ctx, server, listener, statusGrace)
}
