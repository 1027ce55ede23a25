package httpguard_test

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/httpguard"
)

func ok(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") }

// limited returns a limit of connections.
func limited(t *testing.T, maxConns int) *connlimit.Limit {
	t.Helper()
	limit := connlimit.New("test", maxConns, 0)
	t.Cleanup(limit.Close)
	return limit
}

// serve serves ok on loopback until the test ends.
func serve(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv, bounded := httpguard.New(httpguard.LocalOnly(ok), ln, limited(t, 10), slog.New(slog.DiscardHandler))
	srv.ReadHeaderTimeout, srv.ReadTimeout, srv.IdleTimeout = time.Hour, time.Hour, time.Hour // TestTimeouts tests those of New
	done := make(chan error, 1)
	go func() { done <- srv.Serve(bounded) }()
	t.Cleanup(func() {
		_ = srv.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return ln.Addr().String()
}

// R9: Host and Origin must be this host's, so that neither a page nor a name that a page
// rebinds reaches the endpoints for this host.
func TestLocalOnly(t *testing.T) {
	addr := serve(t)
	_, port, _ := net.SplitHostPort(addr)
	for _, test := range []struct {
		host, origin, site, remote string
		want                       int
	}{
		{want: http.StatusOK},
		{host: "localhost:" + port, want: http.StatusOK},
		{host: "LOCALHOST.", want: http.StatusOK},
		{host: "[::1]:" + port, want: http.StatusOK},
		{host: "[::1]", want: http.StatusOK},
		{host: "attacker.example:" + port, want: http.StatusForbidden},
		{host: "localhost.attacker.example", want: http.StatusForbidden},
		{host: "10.0.0.1:" + port, want: http.StatusForbidden},
		{origin: "http://attacker.example", want: http.StatusForbidden},
		{origin: "http://127.0.0.1:1", want: http.StatusForbidden},
		{origin: "null", want: http.StatusForbidden},
		{origin: "http://" + addr, want: http.StatusOK},
		{site: "cross-site", want: http.StatusForbidden},
		{site: "same-site", want: http.StatusForbidden},
		{site: "none", want: http.StatusOK},
		{remote: "192.0.2.1:5", want: http.StatusForbidden},
		{remote: "[::ffff:127.0.0.1]:5", want: http.StatusOK},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+"/quit", http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if test.host != "" {
			req.Host = test.host
		}
		if test.origin != "" {
			req.Header.Set("Origin", test.origin)
		}
		if test.site != "" {
			req.Header.Set("Sec-Fetch-Site", test.site)
		}
		got := 0
		if test.remote != "" { // an address of no socket
			req.RemoteAddr = test.remote
			rec := httptest.NewRecorder()
			httpguard.LocalOnly(ok).ServeHTTP(rec, req)
			got = rec.Code
		} else {
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			got = resp.StatusCode
		}
		if got != test.want {
			t.Errorf("%+v: got %d", test, got)
		}
	}
}

// pipes is a listener with connections in memory, for tests with synthetic time.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}
func (p pipes) Close() error   { return nil }
func (p pipes) Addr() net.Addr { return &net.TCPAddr{} }

// R9: a connection ends if it has no request, half a request, or is idle after one.
func TestTimeouts(t *testing.T) {
	for sent, within := range map[string]time.Duration{
		"":                            11 * time.Second,
		"GET / HTTP/1.1\r\nHost: loc": 11 * time.Second,
		"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf": 11 * time.Second,
		"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n":                           31 * time.Second,
	} {
		synctest.Test(t, func(t *testing.T) {
			ln := make(pipes, 1)
			srv, bounded := httpguard.New(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.ReadAll(r.Body)
			}), ln, limited(t, 1), slog.New(slog.DiscardHandler))
			done := make(chan error, 1)
			go func() { done <- srv.Serve(bounded) }()
			client, server := net.Pipe()
			ln <- server
			if _, err := io.WriteString(client, sent); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			_, err := io.Copy(io.Discard, client)
			if took := time.Since(start); err != nil || took > within {
				t.Errorf("%q: ended after %v, %v; want within %v", sent, took, err, within)
			}
			close(ln)
			if err := <-done; !errors.Is(err, net.ErrClosed) {
				t.Error(err)
			}
			_ = srv.Close()
		})
	}
}
