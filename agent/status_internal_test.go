package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"

	"github.com/nametap/nametap/internal/connlimit"
)

// A memory listener says that it is closed as others do.
type memoryListener struct{ *bufconn.Listener }

func (l memoryListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, net.ErrClosed
	}
	return conn, nil
}

// TestStatusEnd checks that a request in flight is answered before the status server ends, unless it takes long.
func TestStatusEnd(t *testing.T) { // R9
	t.Parallel()
	for takes, answered := range map[time.Duration]bool{500 * time.Millisecond: true, 2 * time.Second: false} {
		synctest.Test(t, func(t *testing.T) {
			listener := memoryListener{bufconn.Listen(1 << 10)}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			e := &statusPart{limit: connlimit.New("status", 1, 0), log: slog.New(slog.DiscardHandler), handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				cancel()
				time.Sleep(takes) //nolint:forbidigo // the bubble's clock
				fmt.Fprint(w, "done")
			})}
			e.use(listener)
			client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return listener.DialContext(ctx)
			}}}
			got := make(chan string, 1)
			go func() {
				defer close(got)
				resp, err := client.Get("http://agent")
				if err != nil {
					return
				}
				defer resp.Body.Close()
				body, _ := io.ReadAll(resp.Body)
				got <- string(body)
			}()
			began := time.Now()
			e.run(ctx)
			if took, body := time.Since(began), <-got; (body == "done") != answered || took > time.Second || !answered && took < time.Second {
				t.Errorf("a request of %v: got %q, and the server ended after %v", takes, body, took)
			}
			time.Sleep(takes) //nolint:forbidigo // until the handler ends
		})
	}
}
