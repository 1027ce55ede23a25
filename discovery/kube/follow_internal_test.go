package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// restored is an API server whose etcd was restored from a backup: it has other objects in each list, and its watches
// send nothing.
type restored struct {
	noStream int // the status with which it refuses to send a list as a stream; 0 if it sends it
	mu       sync.Mutex
	versions []string        // that lists of Services have asked for
	lists    []time.Duration // when these began
	began    time.Time
}

// RoundTrip answers a request.
func (r *restored) RoundTrip(request *http.Request) (*http.Response, error) {
	query := request.URL.Query()
	initial, isWatch := query.Get("sendInitialEvents") == "true", query.Get("watch") == "true"
	status, body := http.StatusOK, io.Reader(strings.NewReader(""))
	switch {
	case strings.Count(request.URL.Path, "/") <= 3 && strings.HasPrefix(request.URL.Path, "/apis/"): // versions of custom resources
		status = http.StatusNotFound
	case !isWatch:
		body = strings.NewReader(`{"metadata": {"resourceVersion": "10"}, "items": [` + r.next(request) + `]}`)
	case initial && r.noStream != 0:
		status, body = r.noStream, strings.NewReader(`{"kind": "Status", "apiVersion": "v1", "reason": "BadRequest", "code": 400}`)
	default:
		events := ""
		if initial {
			events = fmt.Sprintf(`{"type": "ADDED", "object": %s} {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "10", "annotations": {"k8s.io/initial-events-end": "true"}}}}`, r.next(request))
		}
		never, end := io.Pipe()
		context.AfterFunc(request.Context(), func() { _ = end.Close() })
		body = io.MultiReader(strings.NewReader(events), never)
	}
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(body), Request: request}, nil
}

// next returns the object that a list has at this time.
func (r *restored) next(request *http.Request) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if request.URL.Path == pathServices {
		r.versions, r.lists = append(r.versions, request.URL.Query().Get("resourceVersion")), append(r.lists, time.Since(r.began))
	}
	return fmt.Sprintf(`{"metadata": {"name": "s%d", "namespace": "shop", "resourceVersion": "10"}}`, time.Since(r.began))
}

// D60: the objects are listed again after at most 10 min, although no watch has ended.
func TestListedAgain(t *testing.T) {
	for name, noStream := range map[string]int{"streams": 0, "plain lists": http.StatusBadRequest, "a proxy": http.StatusOK} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &restored{noStream: noStream, began: time.Now()}
				access, err := newAccess(&rest.Config{Host: "http://api.test", Transport: r})
				if err != nil {
					t.Fatal(err)
				}
				s := access.NewObjects(source.ObjectsConfig{Changed: func() {}, Logger: testlog.New(t).Logger()})
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { s.Run(ctx) })
				last := 0
				for range 6 {
					time.Sleep(10 * time.Minute) //nolint:forbidigo // in virtual time
					synctest.Wait()
					services, _ := s.built[0].all()
					r.mu.Lock()
					if len(r.lists) <= last || len(services) != 1 || s.Waiting() != "" {
						t.Errorf("listed after %v: %d Services, waiting %q", r.lists, len(services), s.Waiting())
					}
					last = len(r.lists)
					r.mu.Unlock()
				}
				cancel()
				running.Wait()
				if last > 8 || slices.ContainsFunc(r.versions, func(v string) bool { return v != "" }) {
					t.Errorf("listed after %v, from versions %q", r.lists, r.versions)
				}
			})
		})
	}
}
