package kube

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
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

// syncStore keeps a store in step with a resource until ctx ends. After at most maxAge, it lists the resource again.
// Until the list is complete, the store has the same objects as before.
func syncStore(ctx context.Context, l lister, store cache.ReflectorStore, h *health) {
	silent := logr.Discard() // h logs what matters
	for ctx.Err() == nil {
		round, end := context.WithTimeout(ctx, maxAge-rand.N(maxAge/5))
		h.setRelist(end)
		cache.NewReflectorWithOptions(l.listWatch(h), l.kind, store, cache.ReflectorOptions{
			Name: h.resource, Logger: &silent, Backoff: retry(),
		}).RunWithContext(klog.NewContext(round, silent))
		end()
	}
}

// A health records whether requests for a resource succeed. It logs when requests begin to fail, and when they succeed
// again.
type health struct {
	resource string
	log      *slog.Logger

	mu           sync.Mutex
	failure      error           // of the last request; nil if it succeeded
	failingSince time.Time       // when requests began to fail; zero without a failure
	logged       logonce.Failure // the failure that was logged
	latest       time.Time       // when a request last succeeded
	relists      func()          // makes syncStore list again; nil before it runs
}

func (h *health) setRelist(relists func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.relists = relists
}

// relist makes syncStore list again, if it runs.
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
			h.log.Error("cannot read from the Kubernetes API; the objects stay as they are", "what", h.resource, "error", err)
		}
		return
	}
	h.failure, h.failingSince, h.latest = nil, time.Time{}, time.Now()
	if h.logged.Ended(nil) {
		h.logged.Forget()
		h.log.Info("reading from the Kubernetes API again", "what", h.resource)
	}
}

// status returns the state of the resource. The parameter objects is the number of its objects in use.
func (h *health) status(objects int, synced bool) source.Status {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := source.Status{Resource: h.resource, Objects: objects, Synced: synced, Heard: h.latest}
	if h.failure != nil {
		s.Failure, s.FailingSince = h.failure.Error(), h.failingSince
	}
	return s
}

// listWatch returns the lister in the form that a Reflector needs. The result notes in h how each request ended. Each
// list requests the newest state.
func (l lister) listWatch(h *health) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
			found, err := l.list(ctx, options)
			h.noteRequest(ctx, err)
			return found, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			if options.SendInitialEvents != nil && *options.SendInitialEvents {
				options.ResourceVersion = ""
			}
			events, err := l.watch(ctx, options)
			h.noteRequest(ctx, err)
			return events, err
		},
	}
}
