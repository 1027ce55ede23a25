package test

import (
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// dialStatus connects to the status endpoints from the host.
func (h *host) dialStatus(address string) net.Conn {
	h.tb.Helper()
	var conn net.Conn
	var err error
	h.Run(func() { conn, err = net.DialTimeout("tcp", address, wait.Limit) })
	if err == nil {
		err = conn.SetDeadline(time.Now().Add(2 * wait.Limit))
	}
	if err != nil {
		h.tb.Fatal(err)
	}
	return conn
}

// TestStatusForeignPages checks that endpoints for clients on this host refuse requests
// that a browser on this host sends for a page of another site.
func TestStatusForeignPages(t *testing.T) { // R9
	t.Parallel()
	h := newHost(t)
	a := h.start()
	const forbidden = "HTTP/1.1 403 Forbidden"
	for headers, want := range map[string]string{
		"Host: " + statusAddr: "HTTP/1.1 200 OK",
		"Host: localhost":     "HTTP/1.1 200 OK",
		"Host: [::1]:15054":   "HTTP/1.1 200 OK",
		"Host: localhost:15054\r\nOrigin: http://localhost:15054":                              "HTTP/1.1 200 OK",
		"Host: localhost:15054\r\nOrigin: http://evil.example":                                 forbidden,
		"Host: localhost:15054\r\nOrigin: http://localhost:8080":                               forbidden,
		"Host: localhost:15054\r\nOrigin: null":                                                forbidden,
		"Host: localhost:15054\r\nSec-Fetch-Site: cross-site":                                  forbidden,
		"Host: evil.example:15054":                                                             forbidden,
		"Host: localhost.evil.example":                                                         forbidden,
		"Host: 192.0.2.1:15054":                                                                forbidden,
		"Host: evil.example:15054\r\nOrigin: http://evil.example:15054":                        forbidden,
		"Host: localhost\r\nOrigin: http://localhost\r\nOrigin: http://evil.example":           forbidden,
		"Host: evil.example\r\nOrigin: http://evil.example\r\nSec-Fetch-Site: same-origin":     forbidden,
		"Host: localhost:15054\r\nOrigin: http://localhost:15054\r\nSec-Fetch-Site: same-site": forbidden,
	} {
		for _, request := range []string{"GET /debug/status", "GET /debug/ndsz", "GET /debug/explain?name=web", "POST /drain", "POST /quitquitquit"} {
			if want != forbidden && strings.HasPrefix(request, "POST") {
				continue // it would end the agent
			}
			if got := h.raw(request + " HTTP/1.1\r\nConnection: close\r\n" + headers + "\r\n\r\n"); got != want {
				t.Errorf("%s with %q: %s, want %s", request, headers, got, want)
			}
		}
		if got := h.raw("GET /healthz/ready HTTP/1.1\r\nConnection: close\r\n" + headers + "\r\n\r\n"); got != "HTTP/1.1 200 OK" {
			t.Errorf("a probe with %q: %s", headers, got)
		}
	}
	if got := h.raw("POST /quitquitquit HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n\r\n"); got != "HTTP/1.1 200 OK" {
		t.Errorf("/quitquitquit: %s", got)
	}
	wait.For(t, "the agent ends", a.ended)
}

// TestStatusIdleConnections checks that idle and slow clients are limited, and block
// neither probes nor each other.
func TestStatusIdleConnections(t *testing.T) { // R9
	t.Parallel()
	h := newHost(t)
	elsewhere := netns.New(t)
	netns.Connect(
		netns.End{NS: h.NS, Name: "eth0", Addrs: []string{self + "/24"}},
		netns.End{NS: elsewhere, Name: "eth0", Addrs: []string{"10.0.0.2/24"}},
	)
	a := h.start("--status-addr", ":15054")
	before := a.openFiles()
	remote := &host{NS: elsewhere, tb: t}
	var conns []net.Conn
	for i := range 300 {
		conn := remote.dialStatus(self + ":15054")
		defer conn.Close()
		conns = append(conns, conn)
		switch i % 3 {
		case 0: // idle after a request
			if _, err := fmt.Fprintf(conn, "GET /healthz/live HTTP/1.1\r\nHost: %s\r\n\r\n", self); err != nil {
				t.Fatal(err)
			}
		case 1: // in the middle of a request
			if _, err := fmt.Fprint(conn, "GET /healthz/live HTTP/1.1\r\nHost: "); err != nil {
				t.Fatal(err)
			}
		}
	}
	if got := h.get("/healthz/ready"); !strings.HasPrefix(got, "HTTP/1.0 200") {
		t.Errorf("a probe: %s", got)
	}
	wait.Until(t, "few are open", func() bool { return a.openFiles() < before+100 })
	for _, conn := range conns { // connections that were not closed to make room time out
		_, _ = io.Copy(io.Discard, conn)
	}
	wait.Until(t, "all are closed", func() bool { return a.openFiles() <= before+4 })
}
