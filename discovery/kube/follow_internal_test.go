package kube

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/internal/testkit/testlog"
)

// A scripted API server lists and watches objects that do not change, in virtual time.
type scripted struct {
	plain bool // it does not send lists as streams

	mu        sync.Mutex
	takes     time.Duration // of a list
	bookmarks time.Duration // between bookmarks; 0 for none
	cut       time.Duration // after which a watch ends; 0 if it ends at its time
	busy      int           // watches without a list that are still refused
	began     time.Time
	lists     []time.Duration // when lists began
	options   []metav1.ListOptions
	resumed   int // watches that sent no list
}

func (s *scripted) note(options metav1.ListOptions, list bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options = append(s.options, options)
	if list {
		s.lists = append(s.lists, time.Since(s.began))
	} else {
		s.resumed++
	}
}

// taken returns when lists began since the last call, and how many watches were resumed.
func (s *scripted) taken() (lists []time.Duration, resumed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	lists, resumed = s.lists, s.resumed
	s.lists, s.resumed = nil, 0
	return lists, resumed
}

func (s *scripted) set(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

// isBusy reports whether a watch is refused.
func (s *scripted) isBusy(list bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if list || s.busy == 0 {
		return false
	}
	s.busy--
	return true
}

func (s *scripted) list(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
	s.note(options, true)
	time.Sleep(s.takes) //nolint:forbidigo // in virtual time
	return &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}}, nil
}

func (s *scripted) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	list := options.SendInitialEvents != nil
	if list && s.plain {
		return nil, apierrors.NewBadRequest("sendInitialEvents is forbidden")
	}
	if s.isBusy(list) {
		return nil, apierrors.NewTooManyRequests("busy", 1)
	}
	s.note(options, list)
	s.mu.Lock()
	ends := time.Duration(*options.TimeoutSeconds) * time.Second
	if s.cut > 0 {
		ends = s.cut
	}
	every, takes := s.bookmarks, s.takes
	s.mu.Unlock()
	if every == 0 {
		every = 24 * time.Hour
	}
	events := make(chan watch.Event)
	w := watch.NewProxyWatcher(events)
	go func() {
		defer close(events)
		end, ticks := time.NewTimer(ends), time.NewTicker(every)
		defer end.Stop()
		defer ticks.Stop()
		first := make(<-chan time.Time)
		if list {
			first = time.After(takes)
		}
		for {
			mark := &corev1.Service{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "10"}}
			select {
			case <-first:
				mark.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
			case <-ticks.C:
			case <-end.C:
				return
			case <-w.StopChan():
				return
			case <-ctx.Done():
				return
			}
			select {
			case events <- watch.Event{Type: watch.Bookmark, Object: mark}:
			case <-w.StopChan():
				return
			}
		}
	}()
	return w, nil
}

// follow follows the API server in virtual time while test runs.
func (s *scripted) follow(t *testing.T, test func(h *health, log *testlog.Buffer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		log := testlog.New(t)
		m := &mirror[bool]{
			health: health{resource: "services", log: log.Logger()}, changed: func() {}, parts: map[cache.ObjectName]bool{},
			part: func(metav1.Object) bool { return true },
		}
		ctx, cancel := context.WithCancel(t.Context())
		s.began = time.Now()
		var running sync.WaitGroup
		running.Go(func() { syncStore(ctx, lister{kind: &corev1.Service{}, list: s.list, watch: s.watch}, m, &m.health) })
		synctest.Wait()
		test(&m.health, log)
		cancel()
		running.Wait()
	})
}

// pass lets virtual time pass.
func pass(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // in virtual time
	synctest.Wait()
}

// D60: objects are listed again after nothing was sent for 3 min, which is logged once. While bookmarks come, and watches
// end at their time, they are not.
func TestSilence(t *testing.T) {
	for name, s := range map[string]*scripted{"streams": {}, "plain lists": {plain: true}} {
		t.Run(name, func(t *testing.T) {
			s.follow(t, func(h *health, log *testlog.Buffer) {
				pass(10 * time.Minute)
				if lists, _ := s.taken(); !slices.Equal(lists, []time.Duration{0, 3 * time.Minute, 6 * time.Minute, 9 * time.Minute}) {
					t.Errorf("listed after %v", lists)
				}
				if n := log.Count("sends nothing", "what=services"); n != 1 {
					t.Errorf("%d lines in the log, want 1", n)
				}
				s.set(func() { s.bookmarks = time.Minute })
				pass(3 * time.Minute)
				_, _ = s.taken()
				pass(2 * time.Hour)
				if lists, resumed := s.taken(); len(lists) != 0 || resumed < 10 {
					t.Errorf("listed after %v, and %d watches were resumed", lists, resumed)
				}
				if heard := time.Since(h.status(0, true).Heard); heard > 2*time.Minute {
					t.Errorf("heard %v ago", heard)
				}
				s.set(func() { s.bookmarks = 0 })
				pass(15 * time.Minute)
				if n := log.Count("sends nothing", "what=services"); n != 2 {
					t.Errorf("%d lines in the log, want 2", n)
				}
			})
			for _, options := range s.options {
				if list := options.SendInitialEvents != nil || options.TimeoutSeconds == nil; list != (options.ResourceVersion == "") {
					t.Errorf("a request for the version %q: %+v", options.ResourceVersion, options)
				}
				if options.TimeoutSeconds != nil && !options.AllowWatchBookmarks {
					t.Errorf("a request without bookmarks: %+v", options)
				}
			}
		})
	}
}

// D60: a list that sends nothing for 3 min is begun again.
func TestSilentList(t *testing.T) {
	s := &scripted{takes: 24 * time.Hour}
	s.follow(t, func(*health, *testlog.Buffer) {
		pass(7 * time.Minute)
		if lists, _ := s.taken(); !slices.Equal(lists, []time.Duration{0, 3 * time.Minute, 6 * time.Minute}) {
			t.Errorf("listed after %v", lists)
		}
	})
}

// D60: a list that takes longer than 3 min goes on while it sends something.
func TestSlowList(t *testing.T) {
	s := &scripted{takes: 10 * time.Minute, bookmarks: time.Minute}
	s.follow(t, func(h *health, _ *testlog.Buffer) {
		s.set(func() { s.cut = time.Hour })
		h.relist()
		pass(15 * time.Minute)
		if lists, _ := s.taken(); len(lists) != 2 {
			t.Errorf("listed after %v", lists)
		}
	})
}

// D60: a watch that an API server is too busy for goes on later: the same API server has ended the
// last watch.
func TestBusy(t *testing.T) {
	s := &scripted{bookmarks: time.Minute, busy: 3}
	s.follow(t, func(*health, *testlog.Buffer) {
		pass(time.Hour)
		if lists, resumed := s.taken(); len(lists) != 1 || resumed < 5 || s.busy != 0 {
			t.Errorf("listed after %v, and %d watches were resumed", lists, resumed)
		}
	})
}

// D60: after a watch has ended early, the next one does not continue from its version: etcd may have been restored.
func TestWatchEndsEarly(t *testing.T) {
	s := &scripted{bookmarks: time.Minute, cut: 4 * time.Minute}
	s.follow(t, func(*health, *testlog.Buffer) {
		pass(time.Hour)
		if lists, resumed := s.taken(); len(lists) != 15 || resumed != 0 {
			t.Errorf("listed after %v, and %d watches were resumed", lists, resumed)
		}
	})
}
