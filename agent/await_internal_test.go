package agent

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A roundTrip answers requests in place of a server.
type roundTrip func(r *http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// I0: if the time is over while the agent is asked, the error says why the agent was not ready.
func TestAwaitReadyEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := AwaitReady(ctx, roundTrip(func(r *http.Request) (*http.Response, error) {
			if time.Since(began) > time.Second/2 {
				<-r.Context().Done() // the request does not end before ctx
				return nil, r.Context().Err()
			}
			return &http.Response{StatusCode: http.StatusServiceUnavailable, Body: io.NopCloser(strings.NewReader("no table yet\n"))}, nil
		}))
		if err == nil || err.Error() != "no table yet" {
			t.Errorf("%v, want the last reason", err)
		}
	})
}
