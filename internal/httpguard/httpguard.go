// Package httpguard makes HTTP servers that strangers cannot exhaust, and keeps
// pages of a browser and other hosts from endpoints that are for this host only.
package httpguard

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"
)

// MaxConns is how many connections a status server has at a time. A connection
// costs about 19 KB.
const MaxConns = 128

// Bounds of one request: probes and scrapes are short, and the table of a large
// mesh takes a while to be written.
const (
	headerTimeout  = 5 * time.Second
	requestTimeout = 10 * time.Second
	writeTimeout   = 60 * time.Second
	idleTimeout    = 30 * time.Second
	maxHeaderBytes = 16 << 10
)

// New returns a server with time-outs and at most maxConns connections. When
// another one comes, the connection that has been without a request for longest
// is closed; if all have one, the new connection is.
func New(handler http.Handler, maxConns int) *http.Server {
	c := &conns{max: maxConns, idle: map[net.Conn]uint64{}, all: map[net.Conn]bool{}}
	return &http.Server{
		Handler: handler, ConnState: c.changed,
		ReadHeaderTimeout: headerTimeout, ReadTimeout: requestTimeout, WriteTimeout: writeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
	}
}

// conns keeps the connections of a server within their bound.
type conns struct {
	mu    sync.Mutex
	max   int
	all   map[net.Conn]bool
	idle  map[net.Conn]uint64 // without a request, since this change
	clock uint64              // counts changes
}

// changed is the server's ConnState.
func (c *conns) changed(conn net.Conn, state http.ConnState) {
	if victim := c.note(conn, state); victim != nil {
		_ = victim.Close() // the server's own read of it ends, and tells us so
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

// foreign says why a request is not from a program on this host, or "".
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

// isLocal reports whether a Host header names this host by a name or an address
// that no other host can have. Clients of HTTP/1.0 need not send one, and no browser
// is among them.
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
