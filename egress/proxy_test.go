package egress

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
)

// A tunnelEnd answers a request of a tunnel, and keeps it.
type tunnelEnd struct {
	strings.Builder

	response io.Reader
}

func (e *tunnelEnd) Read(b []byte) (int, error) { return e.response.Read(b) }

// E15: what a proxy answers to CONNECT, and that no byte after the head is read.
func TestTunnel(t *testing.T) {
	t.Parallel()
	for response, want := range map[string]string{
		"HTTP/1.1 200 OK\r\n\r\n":                                          "",
		"HTTP/1.0 200 Connection established\r\nVia: x\r\n\r\n":            "",
		"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n":                    "",
		"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 299 Fine\r\n\r\n":         "",
		"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n":               `the proxy answers "407 Proxy Authentication Required"`,
		"HTTP/1.1 302 Found\r\nLocation: http://x/\r\n\r\n":                `the proxy answers "302 Found"`,
		"SSH-2.0-OpenSSH_9.2p1\r\n":                                        "malformed",
		"":                                                                 "EOF",
		"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20) + "\r\n\r\n": "longer than",
	} {
		const after = "220 the host"
		end := &tunnelEnd{response: strings.NewReader(response)}
		if want == "" {
			end.response = strings.NewReader(response + after)
		}
		err := requestTunnel(end, "a.example.org:25")
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: %v, want %q", response, err, want)
		}
		if rest, _ := io.ReadAll(end.response); want == "" && string(rest) != after {
			t.Errorf("%q: %q is left of what the host sends", response, rest)
		}
		if got := end.String(); got != "CONNECT a.example.org:25 HTTP/1.1\r\nHost: a.example.org:25\r\n\r\n" {
			t.Errorf("the request is %q", got)
		}
	}
}

// E8, E15: the proxy connects to one target after the other, and is asked for none that it must not connect to.
func TestConnectByProxy(t *testing.T) {
	t.Parallel()
	proxy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer proxy.Close()
	ctx, gone := context.WithCancel(t.Context())
	defer gone()
	go http.Serve(proxy, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { //nolint:errcheck,gosec // ends with the listener
		switch r.Host {
		case "silent.example.org:7":
			gone()
			<-r.Context().Done()
		case "lost.example.org:7":
			http.Error(w, "no such host", http.StatusBadGateway)
		default:
			conn, buffered, err := w.(http.Hijacker).Hijack()
			if err == nil {
				fmt.Fprintf(buffered, "HTTP/1.1 200 OK\r\n\r\n220 %s\n", r.Host)
				buffered.Flush()
				conn.Close()
			}
		}
	}))
	name := func(name string) endpoint { return endpoint{name: name, port: 7} }
	address := func(addr string) endpoint { return endpoint{addr: netip.MustParseAddr(addr), port: 7} }
	d := dialerOf(&zone{})
	d.config.Proxy = proxy.Addr().String()
	for _, test := range []struct {
		want    string
		targets []endpoint
	}{
		{"220 a.example.org:7", []endpoint{name("a.example.org")}},
		{"220 192.0.2.1:7", []endpoint{address("192.0.2.1")}},
		{"220 a.example.org:7", []endpoint{name("lost.example.org"), address("127.0.0.1"), name("a.example.org")}},
		{"502 Bad Gateway", []endpoint{name("lost.example.org")}},
		{"127.0.0.1 is loopback", []endpoint{address("127.0.0.1")}},
		{"no hostname", []endpoint{name("localhost/.example.org")}},
		{"ends in a number", []endpoint{name("x.0x7f")}},
		{"timeout", []endpoint{name("silent.example.org"), name("a.example.org")}}, // then the client has gone
	} {
		conn, to, err := d.connect(ctx, test.targets, normally)
		got := fmt.Sprint(err)
		if err == nil {
			got, err = bufio.NewReader(conn).ReadString('\n')
			if conn.Close(); err != nil || to.String() != d.config.Proxy {
				t.Errorf("%v: from %v, %v", test.targets, to, err)
			}
		}
		if !strings.Contains(got, test.want) {
			t.Errorf("%v: %q, want %q", test.targets, got, test.want)
		}
	}
	d.running.Wait()
}
