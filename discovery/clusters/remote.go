package clusters

import (
	"bytes"
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// A remote is a cluster other than the own one.
type remote struct {
	name   string
	cfg    source.ClustersConfig
	notify func() // called when there may be something to read
	log    *slog.Logger
	wanted wanted
	// problem is why the kubeconfig cannot be used; empty if it can.
	problem string
	// live has the objects in use. It is nil until all objects were read once. next reads the objects with new
	// credentials, and replaces live when it has read all of them. It is nil if there are no new credentials.
	live, next *link
	// firstNamed is when a Secret first named the cluster. From deadline on, tables are served even without the
	// cluster's objects.
	firstNamed, deadline time.Time
	overdue              bool      // the log says that the cluster is missing
	unwanted             time.Time // since when no Secret names the cluster; zero while a Secret does

	tried    bool      // restoring the saved objects was tried, or is needless
	restored *snapshot // the saved objects that are in use; nil for none
	unsaved  bool      // the saved objects are older than live
	saved    time.Time // when the objects were last saved
}

// newRemote returns a cluster that a Secret names from now on.
func newRemote(name string, cfg source.ClustersConfig, notify func()) *remote {
	now := time.Now()
	return &remote{name: name, cfg: cfg, notify: notify, log: cfg.Logger.With("cluster", name), firstNamed: now, deadline: now.Add(cfg.Wait)}
}

// connect follows the cluster with the kubeconfig of w, unless it does so already.
func (r *remote) connect(ctx context.Context, w wanted) {
	same := bytes.Equal(w.kubeconfig, r.wanted.kubeconfig) && (r.live != nil || r.next != nil || r.problem != "")
	r.wanted, r.unwanted = w, time.Time{}
	if same {
		return
	}
	next, err := r.newLink(ctx)
	if err != nil {
		r.problem = err.Error()
		return
	}
	r.problem = ""
	r.next.close()
	r.next = next
	r.log.Info("reading a cluster", "from", w.secret.String())
}

// newLink makes a client of the cluster.
func (r *remote) newLink(ctx context.Context) (*link, error) {
	access, err := kube.ParseAccess(r.wanted.kubeconfig)
	if err != nil {
		return nil, err
	}
	l := new(link)
	if l.objects, err = access.NewObjects(source.ObjectsConfig{
		Cluster: r.name, NetworkOf: r.cfg.RootNamespace, Logger: r.cfg.Logger,
		Changed: func() { l.changed.Store(true); r.notify() },
	}); err != nil {
		return nil, err
	}
	review, err := access.Reviewer(r.cfg.TokenAudience)
	if err != nil {
		return nil, err
	}
	l.tokens = auth.NewTokens(review)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		l.objects.Run(ctx)
	}()
	l.end = func() { cancel(); <-done }
	return l, nil
}

// read adds to changes what has changed in the cluster.
func (r *remote) read(changes []hosts.Change) []hosts.Change {
	if r.next != nil {
		if from, ok := r.next.read(); ok && from.Waiting == "" {
			return append(changes, r.switchOver())
		}
	}
	if r.live == nil {
		return changes
	}
	from, _ := r.live.read()
	r.unsaved = r.unsaved || len(from.Changes) > 0
	return append(changes, from.Changes...)
}

// switchOver makes next live. It returns a change with all objects of the cluster; applying it does not change objects
// that are equal to those in use.
func (r *remote) switchOver() hosts.Change {
	r.live.close()
	r.live, r.next, r.restored, r.tried, r.unsaved = r.next, nil, nil, true, true
	objects := r.live.objects.All()
	r.log.Info("the objects of a cluster are in use", "objects", len(objects), "from", r.wanted.secret.String())
	return hosts.Change{Cluster: r.name, Updated: objects, Whole: true}
}

// addErrors adds the errors of the cluster to errs.
func (r *remote) addErrors(errs []object.Error) []object.Error {
	if r.problem != "" {
		e := secretError(r.wanted.secret, r.name, r.problem)
		e.Kept = r.used()
		errs = append(errs, e)
	}
	for _, l := range []*link{r.live, r.next} {
		if l != nil {
			errs = append(errs, l.errs...)
		}
	}
	return errs
}

// used reports whether the cluster has objects in use.
func (r *remote) used() bool { return r.live != nil || r.restored != nil }

// waiting returns why the objects of the cluster are not in use; empty if they are.
func (r *remote) waiting() string {
	switch {
	case r.used():
		return ""
	case r.next != nil:
		return "cluster " + r.name + ": " + r.next.objects.Waiting()
	}
	return "cluster " + r.name + ": " + secretError(r.wanted.secret, r.name, r.problem).Error()
}

// givenUp reports whether the first table no longer waits for the cluster. It logs that once.
func (r *remote) givenUp(reason string) bool {
	if time.Now().Before(r.deadline) {
		return false
	}
	if !r.overdue {
		r.overdue = true
		r.log.Error("a cluster cannot be read; its hosts are missing until it can", "error", reason)
	}
	return true
}

// close ends the clients of the cluster.
func (r *remote) close() {
	r.live.close()
	r.next.close()
	r.live, r.next = nil, nil
}

// A link is a client of the API server of a cluster.
type link struct {
	objects *kube.Source
	tokens  *auth.Tokens
	changed atomic.Bool // objects may have changed since the last read
	errs    []object.Error
	end     func() // ends the client, and returns when its goroutines have ended
}

// close ends a client. It does nothing for nil.
func (l *link) close() {
	if l != nil {
		l.end()
	}
}

// read returns what has changed since the last call; ok is false if nothing has.
func (l *link) read() (from source.Reading, ok bool) {
	if !l.changed.Swap(false) {
		return from, false
	}
	from = l.objects.Read()
	l.errs = from.Errors
	return from, true
}
