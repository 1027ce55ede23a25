package kube

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/logonce"
)

// maxAge bounds how old the last list of a resource is. A list takes the place of all that a watch may have missed: after
// etcd was restored from a backup, the API server accepts a watch from a version that it has not reached yet, and sends
// nothing up to that version (kubernetes#107457).
const maxAge = 10 * time.Minute

// retry returns the pauses between failed requests: 0.5 s at first, and at most about 3 s. So the source has caught up
// five seconds after the API server is back.
func retry() *wait.Backoff {
	return &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 100, Cap: 2500 * time.Millisecond}
}

// run keeps the store in step with its resource until ctx ends. It first waits until it is known which namespaces count.
// After at most maxAge, it lists the resource again. Until the list is complete, the store has the same objects as
// before.
func (s *store[T]) run(ctx context.Context) {
	if s.selection != nil {
		select {
		case <-ctx.Done():
			return
		case <-s.selection.ready:
		}
	}
	silent := logr.Discard() // the field health logs what matters
	for ctx.Err() == nil {
		round, end := context.WithTimeout(ctx, maxAge-rand.N(maxAge/5))
		s.setRelist(end)
		cache.NewReflectorWithOptions(s.listWatch(), &item[T]{}, s, cache.ReflectorOptions{
			Name: s.resource.name, Logger: &silent, Backoff: retry(),
		}).RunWithContext(klog.NewContext(round, silent))
		end()
	}
}

// listWatch returns what a Reflector needs to list and watch the resource. Each list requests the newest state.
func (s *store[T]) listWatch() *cache.ListWatch {
	r := s.resource
	decode := func(data []byte) runtime.Object { return s.newItem(data) }
	note := func(ctx context.Context, err error) {
		if apierrors.IsNotFound(err) && r.missing != nil {
			r.missing(err) // ends ctx
		}
		s.noteRequest(ctx, err)
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
			found, err := r.list(ctx, options, decode)
			note(ctx, err)
			return found, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if options.SendInitialEvents != nil && *options.SendInitialEvents {
				options.ResourceVersion = ""
			}
			events, err := r.watch(ctx, options, decode)
			note(ctx, err)
			return events, err
		},
	}
}

// A health records whether requests for a resource succeed. It logs when requests begin to fail, and when they succeed
// again.
type health struct {
	what string // is requested
	log  *slog.Logger

	mu           sync.Mutex
	failure      error           // of the last request; nil if it succeeded
	failingSince time.Time       // when requests began to fail; zero without a failure
	logged       logonce.Failure // the failure that was logged
	latest       time.Time       // when a request last succeeded
	relists      func()          // makes the Reflector list again; nil before it runs
}

func (h *health) setRelist(relists func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.relists = relists
}

// relist makes the Reflector list again, if it runs.
func (h *health) relist() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.relists != nil {
		h.relists()
	}
}

// noteRequest notes the result of a request, unless ctx has ended.
func (h *health) noteRequest(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		if h.failure == nil {
			h.failingSince = time.Now()
		}
		if h.failure = err; h.logged.Differs(err) {
			h.log.Error("cannot read from the Kubernetes API; the objects stay as they are", "what", h.what, "error", err)
		}
		return
	}
	h.failure, h.failingSince, h.latest = nil, time.Time{}, time.Now()
	if h.logged.Ended(nil) {
		h.logged.Forget()
		h.log.Info("reading from the Kubernetes API again", "what", h.what)
	}
}

// status returns the state of the resource. The parameter objects is the number of its objects in use.
func (h *health) status(objects int, synced bool) source.Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := source.Status{Resource: h.what, Objects: objects, Synced: synced, Heard: h.latest}
	if h.failure != nil {
		s.Failure, s.FailingSince = h.failure.Error(), h.failingSince
	}
	return s
}
