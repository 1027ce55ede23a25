package fakekube

import (
	"context"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// Kubeconfig writes a file with the access to the API server, and returns its path.
func (a *API) Kubeconfig() string {
	a.tb.Helper()
	path := filepath.Join(a.tb.TempDir(), "kubeconfig")
	if err := os.WriteFile(path, []byte(a.KubeconfigWith("{}")), 0o600); err != nil {
		a.tb.Fatal(err)
	}
	return path
}

// KubeconfigWith returns a kubeconfig with the access to the API server. user is the entry of the user in the
// kubeconfig, in YAML on one line, such as "{token: secret}".
func (a *API) KubeconfigWith(user string) string {
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.server.Certificate().Raw})
	return fmt.Sprintf("{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}], users: [{name: u, user: %s}], "+
		"contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}\n", a.server.URL, base64.StdEncoding.EncodeToString(authority), user)
}

// Require makes the server refuse requests without this bearer token from now on, and ends all watches. If token is
// empty, no request is refused.
func (a *API) Require(token string) {
	a.mu.Lock()
	a.required = token
	a.mu.Unlock()
	a.EndWatches()
}

// Leave ends all connections. Until Return, new connections are refused.
func (a *API) Leave() {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		a.server.Close()
	}()
	for { // a watch may have begun since the others were ended
		a.EndWatches()
		a.server.CloseClientConnections()
		select {
		case <-closed:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// Return makes the server accept connections again, after Leave.
func (a *API) Return() {
	a.tb.Helper()
	a.server = a.serve(a.listen(a.server.Listener.Addr().String()))
}

// serve serves on a listener, over TLS.
func (a *API) serve(ln net.Listener) *httptest.Server {
	// Clients that leave during the handshake are no concern of a test.
	quiet := slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	s := &httptest.Server{Listener: ln, Config: &http.Server{Handler: a, ReadHeaderTimeout: time.Minute, ErrorLog: quiet}}
	s.StartTLS()
	return s
}

// listen returns a listener on a local address.
func (a *API) listen(address string) net.Listener {
	a.tb.Helper()
	var lc net.ListenConfig
	ln, err := lc.Listen(context.Background(), "tcp", address)
	if err != nil {
		a.tb.Fatal(err)
	}
	return ln
}

// reserve returns a local address for the API server. A socket that is bound to it keeps the port until the end of the
// test, so no other program gets it while the API server is away.
func reserve(tb testing.TB) string {
	tb.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = syscall.Close(fd) })
	// The listener of the API server has this option, too, and so can be bound to the same port.
	err = errors.Join(syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1),
		syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	if err != nil {
		tb.Fatal(err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		tb.Fatal(err)
	}
	return fmt.Sprint("127.0.0.1:", bound.(*syscall.SockaddrInet4).Port) //nolint:forcetypeassert // of the socket's family
}

// admit reports whether a request is served. If not, admit has answered the request.
func (a *API) admit(w http.ResponseWriter, r *http.Request) bool {
	a.mu.Lock()
	required := a.required
	a.mu.Unlock()
	if required == "" || r.Header.Get("Authorization") == "Bearer "+required {
		return true
	}
	refuse(w, http.StatusUnauthorized, r.URL.Path)
	return false
}
