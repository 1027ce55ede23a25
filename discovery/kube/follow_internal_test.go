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

	"github.com/nametap/nametap/internal/testkit/testlog"
)

// restored is an API server whose etcd was restored from a backup: it has other objects in each list, and its watches
// send nothing.
type restored struct {
	streams bool // it sends lists as streams

	mu       sync.Mutex
	versions []string        // that lists have asked for
	lists    []time.Duration // when lists began
	began    time.Time
}

func (r *restored) next(options metav1.ListOptions) *corev1.Service {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.versions, r.lists = append(r.versions, options.ResourceVersion), append(r.lists, time.Since(r.began))
	return &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "s" + time.Since(r.began).String(), Namespace: "shop", ResourceVersion: "10"}}
}

func (r *restored) list(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
	return &corev1.ServiceList{ListMeta: metav1.ListMeta{ResourceVersion: "10"}, Items: []corev1.Service{*r.next(options)}}, nil
}

func (r *restored) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	list := options.SendInitialEvents != nil
	if list && !r.streams {
		return nil, apierrors.NewBadRequest("sendInitialEvents is forbidden")
	}
	events := make(chan watch.Event, 2)
	if list {
		events <- watch.Event{Type: watch.Added, Object: r.next(options)}
		events <- watch.Event{Type: watch.Bookmark, Object: &corev1.Service{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: "10", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}}}
	}
	context.AfterFunc(ctx, func() { close(events) })
	return watch.NewProxyWatcher(events), nil
}

// D60: the objects are listed again after at most 10 min, although no watch has ended.
func TestListedAgain(t *testing.T) {
	for name, streams := range map[string]bool{"streams": true, "plain lists": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := &restored{streams: streams, began: time.Now()}
				m := newMirror("services", testlog.New(t).Logger(), func() {}, func(o metav1.Object) string { return o.GetName() })
				ctx, cancel := context.WithCancel(t.Context())
				var running sync.WaitGroup
				running.Go(func() { syncStore(ctx, lister{kind: &corev1.Service{}, list: r.list, watch: r.watch}, m, &m.health) })
				last := 0
				for range 6 {
					time.Sleep(10 * time.Minute) //nolint:forbidigo // in virtual time
					synctest.Wait()
					if s := m.status(); len(r.lists) <= last || s.Objects != 1 || s.Failure != "" {
						t.Errorf("listed after %v; the status is %+v", r.lists, s)
					}
					last = len(r.lists)
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
