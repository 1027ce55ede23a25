// Package httpguard makes HTTP servers with limits that clients cannot exhaust, and
// restricts endpoints to programs on this host, without pages in a browser.
package httpguard

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// MaxConns is the limit of connections of a status server. A connection takes about 19 KB.
const MaxConns = 128

// Limits of one request: probes and scrapes are short, but writing the table of a large
// mesh takes longer.
const (
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	writeTimeout   = 60 * time.Second
	idleTimeout    = 30 * time.Second
	maxHeaderBytes = 16 << 10
)

// New returns a server with timeouts and at most maxConns connections. If there are more,
// it closes the connection that has been without a request for longest, or the new one if
// all others have a request.
func New(handler http.Handler, maxConns int) *http.Server {
	c := &conns{max: maxConns, idle: map[net.Conn]uint64{}, all: map[net.Conn]bool{}}
	return &http.Server{
		Handler: handler, ConnState: c.changed,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, WriteTimeout: writeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
	}
}

// conns limits the connections of a server.
type conns struct {
	mu    sync.Mutex
	max   int
	all   map[net.Conn]bool
	idle  map[net.Conn]uint64 // without a request, since this change
	clock uint64              // counts changes
}

// changed is the ConnState function of the server.
func (c *conns) changed(conn net.Conn, state http.ConnState) {
	if victim := c.note(conn, state); victim != nil {
		_ = victim.Close() // the server's read fails, and the server calls changed
	}
}

// note records a change and returns the connection to close, if any.
func (c *conns) note(conn net.Conn, state http.ConnState) net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clock++
	switch state {
	case http.StateNew:
		c.all[conn] = true
		c.idle[conn] = c.clock
	case http.StateIdle:
		c.idle[conn] = c.clock
	case http.StateActive:
		delete(c.idle, conn)
	case http.StateClosed, http.StateHijacked:
		delete(c.idle, conn)
		delete(c.all, conn)
	}
	if state != http.StateNew || len(c.all) <= c.max {
		return nil
	}
	oldest := conn
	for other, since := range c.idle {
		if since < c.idle[oldest] {
			oldest = other
		}
	}
	delete(c.idle, oldest)
	delete(c.all, oldest)
	return oldest
}

// LocalOnly refuses every request that is not from a program on this host: other
// clients, names other than localhost in Host (a page that rebinds its own name to
// this host sends that name), and pages of other origins.
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
// have. HTTP/1.0 does not require the header, and no browser uses HTTP/1.0.
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
