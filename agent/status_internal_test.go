package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
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
	slow := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		cancel()
		for { // until the server is shutting down
			conn, err := net.Dial("tcp", ln.Addr().String())
			if err != nil {
				break
			}
			_ = conn.Close()
		}
		fmt.Fprint(w, "done")
	})
	e := &statusPart{handler: slow, log: slog.New(slog.DiscardHandler)}
	e.use(ln)
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
	e.run(ctx)
	if body := <-got; body != "done" {
		t.Errorf("got %q", body)
	}
}
