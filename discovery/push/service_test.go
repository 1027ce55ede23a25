package push

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/discovery/hosts"
)

// newService returns a service without hosts, whose sources were read.
func newService() *Service {
	read := make(chan struct{})
	close(read)
	return New(Config{
		Hosts: hosts.New("cluster.local", 1), FirstRead: read, AckTimeout: time.Minute,
		Waiting: func() string { return "" }, Logger: slog.New(slog.DiscardHandler),
	})
}

// D43: a client that connects before the first reading waits for it instead of being refused, but
// not forever: the directory may be on a file system that does not answer.
func TestStreamWaitsForFirstReading(t *testing.T) {
	for name, read := range map[string]bool{"read": true, "not read": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, firstRead := newService(), make(chan struct{})
				s.cfg.FirstRead = firstRead
				served := make(chan struct{})
				ctx, cancel := context.WithCancel(t.Context())
				go func() {
					requests := []*Request{{node: &corev3.Node{Id: "sidecar~10.0.0.1~web-0.shop~x"}, typeURL: TypeURL}}
					err := s.serve(ctx, variantSotw, receiver(ctx, requests), func(any) error {
						close(served)
						return nil
					})
					if err != context.Canceled { //nolint:errorlint // the function's own error
						t.Error(err)
					}
				}()
				synctest.Wait()
				select {
				case <-served:
					t.Error("served before the first reading")
				default:
				}
				began := time.Now()
				if read {
					close(firstRead)
				}
				<-served
				if took := time.Since(began); (took == 0) != read {
					t.Errorf("served after %v", took)
				}
				cancel()
				s.Wait()
			})
		})
	}
}

// receiver returns a function that receives requests, and then nothing until ctx ends.
func receiver(ctx context.Context, requests []*Request) func(any) error {
	return func(into any) error {
		if len(requests) == 0 {
			<-ctx.Done()
			return ctx.Err()
		}
		*into.(*Request) = *requests[0]
		requests = requests[1:]
		return nil
	}
}

// D33: a stream on which no table is requested, or a push is not acknowledged, does not occupy a place for long. Requests
// of other types count for neither.
func TestLateClients(t *testing.T) {
	node, other := &corev3.Node{Id: "sidecar~10.0.0.1~web-0.shop~x"}, "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	for name, test := range map[string]struct {
		requests []*Request
		after    time.Duration
	}{
		"silent":             {nil, firstReadWait + time.Minute},
		"other types":        {[]*Request{{node: node, typeURL: other}, {typeURL: other, nonce: "1"}}, firstReadWait + time.Minute},
		"no acknowledgement": {[]*Request{{node: node, typeURL: TypeURL}, {typeURL: other}}, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newService()
				began := time.Now()
				ctx, cancel := context.WithCancel(t.Context())
				err := s.serve(ctx, variantDelta, receiver(ctx, test.requests), func(any) error { return nil })
				if took := time.Since(began); status.Code(err) != codes.DeadlineExceeded || took != test.after {
					t.Errorf("after %v: %v", took, err)
				}
				cancel()
				s.Wait()
			})
		})
	}
}
