package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/nametap/nametap/internal/httpguard"
)

// TestStatusEnd checks that a request in flight is answered before the status server ends.
func TestStatusEnd(t *testing.T) { // R9
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := &statusServer{}
	slow := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		stopped := make(chan struct{})
		s.server.RegisterOnShutdown(func() { close(stopped) })
		cancel()
		<-stopped
		fmt.Fprint(w, "done")
	})
	s.server, s.listener = httpguard.New(slow, ln, maxStatusConns, slog.New(slog.DiscardHandler))
	got := make(chan string, 1)
	go func() {
		resp, err := http.Get("http://" + ln.Addr().String())
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		got <- string(body)
	}()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
	_ = s.server.Close() // ends every request that is still in flight after Run
	if body := <-got; body != "done" {
		t.Errorf("got %q", body)
	}
}

// TestOutsideService checks that clients cannot end the agent of a unit of systemd. R9.
func TestOutsideService(t *testing.T) {
	t.Parallel()
	for service, want := range map[bool]int{false: http.StatusOK, true: http.StatusForbidden} {
		s := &statusServer{agent: &Agent{config: Config{Service: service}}}
		recorder := httptest.NewRecorder()
		s.outsideService(func(http.ResponseWriter, *http.Request) {})(recorder, nil)
		if recorder.Code != want {
			t.Errorf("as a service %v: %d, want %d", service, recorder.Code, want)
		}
	}
}
