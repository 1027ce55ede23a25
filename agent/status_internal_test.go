package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"

	"github.com/nametap/nametap/internal/connlimit"
	"github.com/nametap/nametap/internal/listen"
)

// A memory listener says that it is closed as others do.
type memoryListener struct{ *bufconn.Listener }

func (l memoryListener) File() (*os.File, error) { return nil, errors.ErrUnsupported }

func (l memoryListener) SyscallConn() (syscall.RawConn, error) { return nil, errors.ErrUnsupported }

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
			log := slog.New(slog.DiscardHandler)
			set, err := listen.New(listen.Spec{Log: log, Listen: func(context.Context) (net.Listener, error) { return listener, nil }}, nil)
			if err == nil {
				err = set.Open(ctx)
			}
			if err != nil {
				t.Fatal(err)
			}
			e := &statusPart{Set: set, limit: connlimit.New("status", 1, 0), log: log, handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				cancel()
				time.Sleep(takes) //nolint:forbidigo // the bubble's clock
				fmt.Fprint(w, "done")
			})}
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
			if err := e.run(ctx); err != nil {
				t.Error(err)
			}
			if took, body := time.Since(began), <-got; (body == "done") != answered || took > time.Second || !answered && took < time.Second {
				t.Errorf("a request of %v: got %q, and the server ended after %v", takes, body, took)
			}
			time.Sleep(takes) //nolint:forbidigo // until the handler ends
		})
	}
}
