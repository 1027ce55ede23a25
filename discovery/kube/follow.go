package kube

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/logonce"
)

const (
	// maxSilence is how long the API server may send nothing about a resource before its objects are listed again.
	// It sends a bookmark about once a minute.
	maxSilence = 3 * time.Minute
)

// syncStore keeps a store in step with a resource until ctx ends.
//
// The API server answers a list with its newest state. So a list confirms the content of the store. Each event of the
// watch after the list confirms it, too. A watch that is silent, or that has ended early, confirms nothing: its
// connection may be dead, or etcd may have been restored. After a restore, the API server accepts a watch from a
// version that it has not reached yet, and sends nothing up to that version (kubernetes#107457). So after silence, or
// an early end, the objects are listed again.
func syncStore(ctx context.Context, l lister, store cache.ReflectorStore, h *health) {
	silent := logr.Discard() // h logs what matters
	for ctx.Err() == nil {
		listing, end := context.WithCancel(ctx)
		h.started(end)
		cache.NewReflectorWithOptions(l.listWatch(h), l.kind, store, cache.ReflectorOptions{
			Name: h.resource, Logger: &silent, Backoff: retry(),
		}).RunWithContext(klog.NewContext(listing, silent))
		h.stopped()
		end()
	}
}

// A health records whether requests for a resource succeed, and when the API server last sent something. It logs when
// requests begin to fail, and when they succeed again.
type health struct {
	resource string
	log      *slog.Logger

	mu           sync.Mutex
	failure      error           // of the last request; nil if it succeeded
	failingSince time.Time       // when requests began to fail; zero without a failure
	logged       logonce.Failure // a failure ends when the API server has sent something

	latest    time.Time   // when the API server last sent something
	began     time.Time   // when the last list began
	confirmed time.Time   // when the last complete list began
	restart   func()      // makes syncStore list again; nil while syncStore does not run
	silence   *time.Timer // calls the method silent if nothing comes for maxSilence; nil while syncStore does not run
	unheard   bool        // silence was logged, and since then only lists have come
	resumes   bool        // the next watch may continue where the last watch ended, or from the list
}

// An observedWatch passes the events of a watch to a Reflector, and notes them in a health. The library's watch.Filter
// would leave a goroutine behind if the watch is stopped while Filter has an event to pass.
type observedWatch struct {
	watch.Interface
	health   *health
	deadline time.Time // when the API server ends the watch; zero if never
	events   chan watch.Event
	stopped  chan struct{}
	stop     func() // closes stopped, once
}

// started notes that syncStore begins. The function restart makes syncStore list again.
func (h *health) started(restart func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.restart, h.resumes = restart, false
	h.silence = time.AfterFunc(maxSilence, h.silent)
}

// stopped notes that syncStore has ended.
func (h *health) stopped() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.silence.Stop()
	h.restart, h.silence = nil, nil
}

// running reports whether syncStore runs.
func (h *health) running() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.restart != nil
}

// relist makes syncStore list again, if it runs.
func (h *health) relist() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.relistLocked()
}

func (h *health) relistLocked() {
	if h.restart != nil {
		h.restart()
	}
}

// silent lists again after the API server has sent nothing for maxSilence.
func (h *health) silent() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.failure == nil && !h.unheard {
		h.unheard = true
		h.log.Warn("the Kubernetes API sends nothing, not even a bookmark: the objects are listed again, and every "+maxSilence.String()+
			" while that lasts; see whether a proxy before it holds watches back", "what", h.resource)
	}
	h.relistLocked()
}

// listing notes that a list begins.
func (h *health) listing() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.began, h.resumes = time.Now(), false
}

// complete notes that a store has all objects of a list.
func (h *health) complete() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.confirmed = h.began
}

// resume permits the next watch to continue where the last one ended, or from the list.
func (h *health) resume() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resumes = true
}

// takeResume reports whether a watch may continue. It reports true once after each resume.
func (h *health) takeResume() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	resumes := h.resumes
	h.resumes = false
	return resumes
}

// noteRequest notes the result of a request, unless ctx has ended. When a request succeeds after a failure, it does not
// log that yet. The method heard does, when the API server has sent something.
func (h *health) noteRequest(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case err == nil:
		h.failingSince = time.Time{}
	case h.failure == nil:
		h.failingSince = time.Now()
	}
	if h.failure = err; err != nil && h.logged.Differs(err) {
		h.log.Error("cannot read from the Kubernetes API; the objects stay as they are", "what", h.resource, "error", err)
	}
}

// heard notes that the API server has sent something.
func (h *health) heard() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.latest = time.Now()
	if h.silence != nil {
		h.silence.Reset(maxSilence)
	}
	h.unheard = h.unheard && !h.began.Equal(h.confirmed) // what has come may be a part of a list in flight
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

// listWatch returns the lister in the form that a Reflector needs. The result notes in h how each request ended, and
// when the API server sends something. Each list requests the newest state.
func (l lister) listWatch(h *health) *cache.ListWatch {
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
			if options.Continue == "" {
				h.listing()
			}
			found, err := l.list(ctx, options)
			if h.noteRequest(ctx, err); err == nil {
				h.heard()
				h.resume()
			}
			return found, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			lists := options.SendInitialEvents != nil && *options.SendInitialEvents
			switch {
			case lists:
				options.ResourceVersion = ""
				h.listing()
			case !h.takeResume():
				return nil, apierrors.NewResourceExpired("the last watch has ended early")
			}
			began := time.Now()
			events, err := l.watch(ctx, options)
			h.noteRequest(ctx, err)
			switch {
			case apierrors.IsTooManyRequests(err) && !lists:
				h.resume() // the Reflector tries again
				return nil, err
			case err != nil:
				return nil, err
			}
			o := &observedWatch{Interface: events, health: h, events: make(chan watch.Event), stopped: make(chan struct{})}
			if options.TimeoutSeconds != nil {
				o.deadline = began.Add(time.Duration(*options.TimeoutSeconds) * time.Second)
			}
			o.stop = sync.OnceFunc(func() { close(o.stopped) })
			go o.run(ctx)
			return o, nil
		},
	}
}

// run passes the events to the Reflector until the watch ends.
func (o *observedWatch) run(ctx context.Context) {
	defer close(o.events)
	for e := range o.Interface.ResultChan() {
		o.record(ctx, e)
		select {
		case o.events <- e:
		case <-o.stopped:
			return
		}
	}
	if !o.deadline.IsZero() && !time.Now().Before(o.deadline) {
		o.health.resume()
	}
}

// record notes an event in the health.
func (o *observedWatch) record(ctx context.Context, e watch.Event) {
	if e.Type != watch.Error {
		o.health.heard()
		return
	}
	if o.isStopped() { // then the error may only say that the connection is closed
		return
	}
	// The Reflector asks for a list when the version that it knows is too old.
	if err := apierrors.FromObject(e.Object); !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		o.health.noteRequest(ctx, err)
	}
}

// ResultChan returns the channel of the events.
func (o *observedWatch) ResultChan() <-chan watch.Event { return o.events }

// isStopped reports whether Stop was called.
func (o *observedWatch) isStopped() bool { return chans.Closed(o.stopped) }

// Stop ends the watch.
func (o *observedWatch) Stop() {
	o.stop()
	o.Interface.Stop()
}
