package kube

import (
	"context"
	"math/rand/v2"
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
	silent := logr.Discard() // noteRequest logs what matters
	for ctx.Err() == nil {
		round, end := context.WithTimeout(ctx, maxAge-rand.N(maxAge/5))
		s.mu.Lock()
		s.relist = end
		s.mu.Unlock()
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
			initial := options.SendInitialEvents != nil && *options.SendInitialEvents
			if initial {
				options.ResourceVersion = ""
			}
			events, err := r.watch(ctx, options, decode)
			if err != nil || !initial { // Replace notes that all objects have come
				note(ctx, err)
			}
			return events, err
		},
	}
}

// noteRequest notes the result of a request, unless ctx has ended. It logs when requests begin to fail, and when they
// succeed again.
func (s *store[T]) noteRequest(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		if s.failure == nil {
			s.failingSince = time.Now()
		}
		if s.failure = err; s.logged.Differs(err) {
			s.log.Error("cannot read from the Kubernetes API; the objects stay as they are", "what", s.resource.name, "error", err)
		}
		return
	}
	s.failure, s.heard = nil, time.Now()
	if s.logged.Ended(nil) {
		s.logged.Forget()
		s.log.Info("reading from the Kubernetes API again", "what", s.resource.name)
	}
}

// status returns the state of the resource.
func (s *store[T]) status() source.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := source.Status{Resource: s.resource.name, Objects: len(s.values), Synced: s.synced, Heard: s.heard}
	if s.failure != nil {
		state.Failure, state.FailingSince = s.failure.Error(), s.failingSince
	}
	for _, errs := range s.errs {
		if s.listed && !s.synced && state.Failure == "" {
			state.Failure, state.FailingSince = errs[0].Error(), state.Heard
		}
	}
	return state
}

// pollEvery is the pause between two questions whether the API server serves a custom resource. After a failed question
// it is shorter at first (retry).
const pollEvery = 3 * time.Second

// A custom is a custom resource and its store. All versions of the resource have the same fields.
type custom struct {
	*objects
	group string // of the API
}

// run follows the resource in a version that the API server serves, until ctx ends. When the API server does not find
// that version any more, run asks again which version it serves.
func (c custom) run(ctx context.Context) {
	var missing error // why the API server has not found the version that was followed last
	for failed := retry(); ctx.Err() == nil; {
		pause := pollEvery
		version, served, err := servedVersion(ctx, c.resource.client, c.group, c.resource.name)
		switch {
		case err != nil:
			pause = failed.Step()
			c.noteRequest(ctx, err)
		case !served:
			failed, missing = retry(), nil
			_ = c.Replace(nil, "") // it returns nil
		default:
			failed = retry()
			c.noteRequest(ctx, missing)
			following, end := context.WithCancel(ctx)
			c.resource.path = "/apis/" + c.group + "/" + version + "/" + c.resource.name
			c.resource.missing = func(err error) {
				missing = err
				end()
			}
			c.objects.run(following)
			end()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}
