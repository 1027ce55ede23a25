package agent

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// I0: if the time is over while the agent is asked, the error says why the agent was not ready, and does not blame the
// status address.
func TestAwaitReadyEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) > 5 {
			cancel()
			<-r.Context().Done() // the request does not end before ctx
			return
		}
		http.Error(w, "no table yet", http.StatusServiceUnavailable)
	}))
	defer server.Close()
	w := Awaited{StatusAddr: strings.TrimPrefix(server.URL, "http://"), Logger: slog.New(slog.DiscardHandler)}
	if _, err := w.awaitReady(ctx); err == nil || err.Error() != "no table yet" {
		t.Errorf("%v, want the last reason", err)
	}
}
