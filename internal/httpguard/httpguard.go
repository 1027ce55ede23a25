// Package httpguard makes HTTP servers whose resources clients cannot exhaust. It also has a handler that serves
// only programs on this host, and no web pages of other sites in a browser on this host.
package httpguard

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/listen"
)

// Limits of one request. Probes and scrapes are short; the table of a large mesh takes
// longer to write.
const (
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	writeTimeout   = 60 * time.Second
	idleTimeout    = 30 * time.Second
	maxHeaderBytes = 16 << 10
)

// New returns a server of HTTP/1 for handler, and the listener that the server has to serve: ln, whose connections have
// places of limit. A connection costs about 19 KB. Temporary errors of accept, such as a lack of descriptors, do not end
// the server; they are logged.
func New(handler http.Handler, ln net.Listener, limit *connlimit.Limit, log *slog.Logger) (*http.Server, net.Listener) {
	l := &listener{
		Listener: ln, limit: limit, closed: make(chan struct{}),
		pacer: &listen.Pacer{Log: log, Listener: "status " + ln.Addr().String()},
	}
	var protocols http.Protocols // without HTTP/2, which the build leaves out of net/http
	protocols.SetHTTP1(true)
	return &http.Server{
		Protocols: &protocols, Handler: handler, ConnState: stateChanged,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, WriteTimeout: writeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
	}, l
}

// Serve serves a listener with a server of [New] until ctx ends. Then it waits for the requests in flight, at most
// for the time grace, and returns nil when all connections are closed. It returns an error if the listener fails.
func Serve(ctx context.Context, server *http.Server, ln net.Listener, grace time.Duration) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
		defer cancel()
		if server.Shutdown(ending) != nil {
			_ = server.Close() // closes connections whose clients do not read
		}
	})
	err := server.Serve(ln)
	if !stop() {
		<-stopped // Serve returns when Shutdown begins
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	_ = server.Close() // closes the connections of the listener that failed
	return err
}

// LocalOnly returns a handler that serves only programs on this host. It refuses other clients and pages of other
// origins. It also refuses a Host that is neither localhost nor a loopback address. Such a request may come from a
// page that has made its own name resolve to this host (DNS rebinding).
func LocalOnly(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if why := foreign(r); why != "" {
			http.Error(w, why, http.StatusForbidden)
			return
		}
		next(w, r)
	})
}

// foreign returns the reason why a request is not from a program on this host, or an empty
// string.
func foreign(r *http.Request) string {
	client, err := netip.ParseAddrPort(r.RemoteAddr)
	switch {
	case err != nil || !client.Addr().Unmap().IsLoopback():
		return "for clients on this host only"
	case !isLocal(r.Host):
		return "want localhost or a loopback address as Host"
	}
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		if site != "same-origin" && site != "none" {
			return "not for pages of other sites"
		}
	}
	for _, origin := range r.Header.Values("Origin") {
		if origin != "http://"+r.Host {
			return "not for pages of other sites"
		}
	}
	return ""
}

// isLocal reports whether a Host header has a name or an address that only this host can
// have. An empty Host counts as local: only HTTP/1.0 allows it, and no browser uses HTTP/1.0.
func isLocal(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if host == "" || strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

// listener is a listener whose connections have places.
type listener struct {
	net.Listener
	limit  *connlimit.Limit
	pacer  *listen.Pacer
	closed chan struct{}
	once   sync.Once
}

// Accept returns the next connection. After a temporary error it waits and retries: if it returned the error, the
// server would end.
func (l *listener) Accept() (net.Conn, error) {
	accepted, _, err := l.limit.Accept(l.Listener, l.pacer, l.closed)
	if err != nil {
		return nil, err
	}
	return &conn{accepted, l.limit.Enter(accepted)}, nil
}

// Close closes the listener. It may be called any number of times.
func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// A conn is a connection with a place.
type conn struct {
	net.Conn
	place *connlimit.Place
}

// NetConn returns the connection itself.
func (c *conn) NetConn() net.Conn { return c.Conn }

// Write writes. Until the client has read this, and has sent another request, it is awaited.
func (c *conn) Write(b []byte) (int, error) {
	c.place.Await()
	return c.Conn.Write(b)
}

// Close closes the connection and gives its place back.
func (c *conn) Close() error {
	defer c.place.Leave()
	return c.Conn.Close()
}

// Place returns the place of a connection of a server of [New], as its ConnContext gets it.
func Place(c net.Conn) *connlimit.Place {
	if encrypted, ok := c.(*tls.Conn); ok {
		c = encrypted.NetConn()
	}
	return c.(*conn).place
}

// stateChanged follows the state of a connection. The server calls it ([http.Server].ConnState).
func stateChanged(c net.Conn, state http.ConnState) {
	if state == http.StateActive {
		Place(c).Serve()
	}
}
