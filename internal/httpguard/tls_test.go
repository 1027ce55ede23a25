package httpguard_test

import (
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/httpguard"
)

// TestEvictionOverTLS checks that a client which prefers HTTP/2 gets HTTP/1, and that over TLS, too, an idle connection
// makes room for another one, and not an older one that has a request.
func TestEvictionOverTLS(t *testing.T) { // I10, R9
	begun, release := make(chan struct{}), make(chan struct{})
	handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			close(begun)
			<-release
		}
	})
	certified := httptest.NewTLSServer(nil) // for its certificate
	defer certified.Close()
	var lc net.ListenConfig
	plain, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv, ln := httpguard.New(handler, plain, limited(t, 2), slog.New(slog.DiscardHandler))
	srv.ReadHeaderTimeout, srv.ReadTimeout, srv.WriteTimeout, srv.IdleTimeout = time.Hour, time.Hour, time.Hour, time.Hour
	srv.TLSConfig = &tls.Config{Certificates: certified.TLS.Certificates} //nolint:gosec // the default is good
	changed, idled := srv.ConnState, make(chan struct{}, 10)
	srv.ConnState = func(conn net.Conn, state http.ConnState) {
		if changed(conn, state); state == http.StateIdle {
			idled <- struct{}{}
		}
	}
	served := make(chan error)
	go func() { served <- srv.ServeTLS(ln, "", "") }()
	dial := func() *tls.Conn {
		t.Helper()
		config := certified.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
		config.NextProtos = []string{"h2", "http/1.1"}
		connection, err := (&tls.Dialer{Config: config}).DialContext(t.Context(), "tcp", plain.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conn := connection.(*tls.Conn)
		if got := conn.ConnectionState().NegotiatedProtocol; got != "http/1.1" {
			t.Fatalf("negotiated %q", got)
		}
		return conn
	}
	ask := func(conn net.Conn, path string) {
		t.Helper()
		if _, err := io.WriteString(conn, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
	}
	answer := func(conn net.Conn) error {
		_, err := conn.Read(make([]byte, 1024))
		return err
	}
	slow := dial()
	defer slow.Close()
	ask(slow, "/slow")
	<-begun
	idle := dial()
	defer idle.Close()
	ask(idle, "/")
	if err := answer(idle); err != nil {
		t.Fatal(err)
	}
	<-idled
	third := dial()
	defer third.Close()
	ask(third, "/")
	if err := answer(third); err != nil {
		t.Fatal(err)
	}
	if err := answer(idle); err == nil {
		t.Error("the idle connection is open")
	}
	close(release)
	if err := answer(slow); err != nil {
		t.Errorf("the connection with a request was closed: %v", err)
	}
	if err := errors.Join(srv.Close(), <-served); !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}
