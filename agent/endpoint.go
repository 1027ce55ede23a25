package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/logonce"

	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/sockets"
)

// maxStatusConns is the most connections to an endpoint, to which every host that reaches this
// one can connect.
const maxStatusConns = 64

// statusGrace is how long requests in flight may take at the end.
const statusGrace = time.Second

// An endpoint is a part of the status server with a listener of its own. It ends with the agent
// only: DNS is answered without it. If its listener cannot be opened, or fails, it is opened again
// in the background.
type endpoint struct {
	what    string // in the log
	handler http.Handler
	listen  func(ctx context.Context) (net.Listener, error)
	peers   bool // the users of clients are noted: see peersOnly
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

// fail records, and logs if it is a new one, why the endpoint is not open.
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

// run serves, and opens the listener where it is not open, until ctx ends and the requests in
// flight are done.
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

// serve serves the listener until ctx ends and the requests in flight are done. It returns nil
// then, and an error if the listener fails.
func (e *endpoint) serve(ctx context.Context) error {
	server, listener := httpguard.New(e.handler, e.opened(), maxStatusConns, e.log)
	if e.peers {
		server.ConnContext = notePeer
	}
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), statusGrace)
		defer cancel()
		if server.Shutdown(grace) != nil {
			_ = server.Close() // of connections whose clients do not read
		}
	})
	err := server.Serve(listener)
	if !stop() {
		<-stopped // Serve returns when Shutdown begins
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	_ = server.Close() // the connections of a listener that failed
	return err
}
