package agent

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A roundTrip answers requests in place of a server.
type roundTrip func(r *http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// I0: if the time is over while the agent is asked, the error says why the agent was not ready, and does not blame the
// status address.
func TestAwaitReadyEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), awaitStatus+awaitStatus/10)
		defer cancel()
		w := Awaited{StatusAddr: "127.0.0.1:15020", Logger: slog.New(slog.DiscardHandler), transport: roundTrip(func(r *http.Request) (*http.Response, error) {
			if time.Since(began) > awaitStatus/2 {
				<-r.Context().Done() // the request does not end before ctx
				return nil, r.Context().Err()
			}
			return &http.Response{StatusCode: http.StatusServiceUnavailable, Body: io.NopCloser(strings.NewReader("no table yet\n"))}, nil
		})}
		if _, err := w.awaitReady(ctx); err == nil || err.Error() != "no table yet" {
			t.Errorf("%v, want the last reason", err)
		}
	})
}
