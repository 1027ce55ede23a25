package clusters

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/auth"
	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/discovery/source"
)

// A remote is a cluster other than the own one.
type remote struct {
	name   string
	cfg    source.ClustersConfig
	notify func() // called when there may be something to read
	log    *slog.Logger
	wanted wanted
	// problem is why the kubeconfig cannot be used; empty if it can. Then the last one that could be used stays in use.
	problem string
	// objects and tokens are nil until there was a kubeconfig that can be used. stop ends the client.
	objects *kube.Source
	tokens  *auth.Tokens
	stop    func()
	used    bool // all objects were read once, and are in use
	// From deadline on, tables are served even without the cluster's objects.
	deadline time.Time
	overdue  bool      // the log says that the cluster is missing
	unwanted time.Time // since when no Secret names the cluster; zero while a Secret does
}

// connect follows the cluster with the kubeconfig of w, unless it does so already. With another kubeconfig, all objects are
// read again; until then they stay.
func (r *remote) connect(ctx context.Context, w wanted) {
	same := bytes.Equal(w.kubeconfig, r.wanted.kubeconfig) && (r.objects != nil || r.problem != "")
	r.wanted, r.unwanted = w, time.Time{}
	if same {
		return
	}
	access, err := kube.ParseAccess(w.kubeconfig)
	if err != nil {
		r.problem = err.Error()
		return
	}
	r.problem, r.tokens = "", auth.NewTokens(access.Reviewer(r.cfg.TokenAudience))
	r.stop()
	if r.objects == nil {
		r.objects = access.NewObjects(source.ObjectsConfig{Cluster: r.name, NetworkOf: r.cfg.RootNamespace, Logger: r.cfg.Logger, Changed: r.notify})
	} else {
		r.objects.Use(access)
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { r.objects.Run(ctx) })
	r.stop = func() {
		cancel()
		running.Wait()
	}
	r.log.Info("reading a cluster", "from", w.secret.String())
}

// read adds to u what has changed in the cluster, and its errors.
func (r *remote) read(u *source.Reading) {
	if r.problem != "" {
		e := secretError(r.wanted.secret, r.name, r.problem)
		e.Kept = r.used
		u.Errors = append(u.Errors, e)
	}
	if r.objects == nil {
		return
	}
	from := r.objects.Read()
	u.Changes, u.Errors = append(u.Changes, from.Changes...), append(u.Errors, from.Errors...)
	if from.Read && !r.used {
		r.used = true
		r.log.Info("the objects of a cluster are in use", "from", r.wanted.secret.String())
	}
}

// waiting returns why the objects of the cluster are not in use; empty if they are.
func (r *remote) waiting() string {
	switch {
	case r.used:
		return ""
	case r.objects != nil:
		return "cluster " + r.name + ": " + r.objects.Waiting()
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
