package test

import (
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// tunnel returns a handler that answers CONNECT as if it were the host.
func tunnel(targets chan<- string) func(conn *net.TCPConn) {
	return func(conn *net.TCPConn) {
		if target, ok := readConnect(conn); ok {
			targets <- target
			_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\nthe host, by the proxy")
		}
	}
}

// readConnect reads a CONNECT request and returns its target.
func readConnect(conn *net.TCPConn) (target string, ok bool) {
	var head []byte
	for b := make([]byte, 1); !strings.HasSuffix(string(head), "\r\n\r\n"); head = append(head, b...) {
		if _, err := io.ReadFull(conn, b); err != nil {
			return "", false
		}
	}
	line, _, _ := strings.Cut(string(head), "\r\n")
	return strings.TrimSuffix(strings.TrimPrefix(line, http.MethodConnect+" "), " HTTP/1.1"), true
}

// E15: all bytes after the head of a proxy's response are the host's, whatever the head says. A refusal of
// the proxy is a reset at once.
func TestEgressProxyResponses(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	responses, ended := make(chan string, 1), make(chan error, 1)
	e.serve(serverB+":3128", func(conn *net.TCPConn) {
		if _, ok := readConnect(conn); !ok {
			return
		}
		_, _ = io.WriteString(conn, <-responses)
		_, err := io.Copy(io.Discard, conn)
		ended <- err
	})
	e.capture("--egress-proxy", serverB+":3128", "--drain", "0s")
	const greeting = "220 one by the proxy\n"
	for _, head := range []string{
		"HTTP/1.1 200 OK\r\n\r\n",
		"HTTP/1.0 200 Connection established\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
	} {
		responses <- head + greeting
		if got, want := e.greeting(vipA, "7"), strings.TrimSpace(greeting); got != want {
			t.Errorf("%q: %q, want %q", head, got, want)
		}
		if err := wait.For(t, "the connection to the proxy has ended", ended); err != nil {
			t.Error(err)
		}
	}
	responses <- "HTTP/1.1 403 Forbidden\r\nContent-Length: 100\r\n\r\na body that does not end"
	if got := e.greeting(vipA, "7"); !strings.Contains(got, "reset") {
		t.Errorf("a refusal: %q, want a reset", got)
	}
	// Without waiting for the rest of the body: the end of the time for the dial would be another error.
	if status := e.get("/debug/status"); !strings.Contains(status, `the proxy answers \"403 Forbidden\""`) {
		t.Errorf("want only the answer of the proxy as the reason in:\n%s", status)
	}
}

// E8, E15: a proxy gets no host or endpoint that it could take for an address of itself.
func TestEgressProxyForbidden(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	targets := make(chan string, 10)
	e.serve(serverB+":3128", tunnel(targets))
	e.capture("--egress-proxy", serverB+":3128")
	hosts := map[string]*api.NameTable_NameInfo{
		"127.1": externalHost(nil, "240.240.2.1"), "2130706433": externalHost(nil, "240.240.2.2"),
		"0x7F.1": externalHost(nil, "240.240.2.3"), "127.0.0.1": externalHost(nil, "240.240.2.4"), "127.0.0.0x1": externalHost(nil, "240.240.2.5"),
		exactA: externalHost([]*api.NameTable_Destination{{Port: 80, Endpoints: []string{"127.0X1.:80"}}, {Port: 81, Endpoints: []string{"127.0.0.1:80"}}}, vipA),
		exactB: externalHost([]*api.NameTable_Destination{{Port: 80, Endpoints: []string{"db.example.com.:80"}}}, vipB),
	}
	e.xds.Push(&api.NameTable{Table: hosts})
	wait.Until(t, "the agent has the table", func() bool { return strings.Contains(e.get("/debug/ndsz"), "127.0.0.0x1") })
	for _, addr := range []string{"240.240.2.1:80", "240.240.2.2:80", "240.240.2.3:80", "240.240.2.4:80", "240.240.2.5:80", vipA + ":80", vipA + ":81"} {
		vip, port, _ := net.SplitHostPort(addr)
		if got := e.greeting(vip, port); !strings.Contains(got, "reset") {
			t.Errorf("%s: %q, want a reset", addr, got)
		}
	}
	if got := e.refusals("address"); got != 7 {
		t.Errorf("%v refusals, want 7: %s", got, e.get("/debug/status"))
	}
	if conn := e.mustDial(vipB, "80"); wait.For(t, "the proxy is asked", targets) != "db.example.com.:80" {
		t.Errorf("the proxy was asked for a host that is refused")
	} else if _, err := io.ReadAll(conn); err != nil {
		t.Error(err)
	}
}

// E15, E17: a client's reset while the proxy connects ends that, and counts as closed by the client, not as a failure of
// the proxy.
func TestEgressProxyReset(t *testing.T) {
	t.Parallel()
	e := newEgressVM(t, "nft")
	asked, ended := make(chan string, 1), make(chan error, 1)
	e.serve(serverB+":3128", func(conn *net.TCPConn) {
		target, _ := readConnect(conn)
		asked <- target
		_, err := io.Copy(io.Discard, conn) // without an answer
		ended <- err
	})
	e.capture("--egress-proxy", serverB+":3128")
	conn := e.mustDial(vipA, "7")
	wait.For(t, "the proxy is asked", asked)
	if err := conn.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if err := wait.For(t, "the connection to the proxy ends", ended); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection to the proxy: %v, want a reset", err)
	}
	wait.Until(t, "no connection is open", func() bool { return e.metric("nametap_egress_open_connections") == 0 })
	if closed, failed := e.refusals("closed"), e.refusals("connect"); closed != 1 || failed != 0 {
		t.Errorf("%v closed by the client, %v failures to connect: %s", closed, failed, e.get("/debug/status"))
	}
}
