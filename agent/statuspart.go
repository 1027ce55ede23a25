package agent

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/logonce"
	"github.com/nametap/nametap/internal/sockets"
)

// maxStatusConns is the largest number of connections to the status address, and to the private socket. Every host that
// reaches this host can connect to the status address.
const maxStatusConns = 64

// statusGrace is how long requests in flight may take at the end.
const statusGrace = time.Second

// A statusPart is a part of the status server with its own listener. If the listener cannot be opened, or fails,
// run opens it again. Meanwhile the agent runs without the part, because DNS does not need it.
type statusPart struct {
	name    string // the name of the part in texts
	handler http.Handler
	listen  func(ctx context.Context) (net.Listener, error)
	private bool // whether only root and the agent's user can connect
	limit   *connlimit.Limit
	log     *slog.Logger

	mu       sync.Mutex
	listener net.Listener // nil while it is not open
	err      error        // why it is not open
	logged   logonce.Failure
}

// use sets the listener.
func (p *statusPart) use(listener net.Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.listener, p.err = listener, nil
	p.logged.Forget()
}

// open opens the listener.
func (p *statusPart) open(ctx context.Context) error {
	listener, err := p.listen(ctx)
	if err != nil {
		p.fail(err)
		return err
	}
	p.use(listener)
	return nil
}

// fail records err, the reason why the part is not open. It logs err if it differs from the previous reason.
func (p *statusPart) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.logged.Differs(err) {
		p.log.Warn("degraded: "+p.name+" is not served; retrying", "error", err)
	}
	p.listener, p.err = nil, err
}

// failure returns why the part is not open, nil if it is.
func (p *statusPart) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// opened returns the listener, nil while it is not open.
func (p *statusPart) opened() net.Listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.listener
}

// addr returns the address of the listener, "" while it is not open.
func (p *statusPart) addr() string {
	if listener := p.opened(); listener != nil {
		return listener.Addr().String()
	}
	return ""
}

// run serves until ctx ends and the requests in flight are done. While the listener is not open, run tries to open
// it.
func (p *statusPart) run(ctx context.Context) {
	defer p.limit.Close()
	for ctx.Err() == nil {
		if p.opened() == nil {
			if !sockets.Retry(ctx, func() error { return p.open(ctx) }) {
				return
			}
			p.log.Info(p.name+" is served now", "listener", p.addr())
		}
		if err := p.serve(ctx); err != nil {
			p.fail(err)
		}
	}
}

// serve serves the listener until ctx ends and the requests in flight are done. It returns an error if the listener
// fails.
func (p *statusPart) serve(ctx context.Context) error {
	server, listener := httpguard.New(p.handler, p.opened(), p.limit, p.log)
	server.SetKeepAlivesEnabled(p.private) // elsewhere one client could send any number of requests at once
	return httpguard.Serve(ctx, server, listener, statusGrace)
}
