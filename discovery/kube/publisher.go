package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/source"
)

const (
	configMaps = "configmaps"
	// rootKey is the key of the certificates in a ConfigMap, as in Istio's istio-ca-root-cert. It is
	// the name of the file in which agents look for them.
	rootKey = "root-cert.pem"
)

// isSystem reports whether a namespace is one of Kubernetes' own. They run no workloads of a mesh, and
// istiod leaves them out, too.
func isSystem(namespace string) bool {
	return namespace == metav1.NamespaceSystem || namespace == metav1.NamespacePublic || namespace == corev1.NamespaceNodeLease
}

// A publisher keeps the certificates of the authorities in a ConfigMap of each namespace, since a pod
// can only mount ConfigMaps of its own namespace.
type publisher struct {
	name       string // of the ConfigMaps
	clients    *sharedClients
	log        *slog.Logger
	namespaces *mirror[bool]   // whether a namespace can get a ConfigMap
	configMaps *mirror[string] // the certificates in them
	changed    chan struct{}

	mu     sync.Mutex
	roots  string // to publish; "" if there are none yet
	unsure bool   // whether other replicas may know newer roots
	absent int    // namespaces that lacked the roots after the last pass
}

func newPublisher(name string, clients *sharedClients, log *slog.Logger) *publisher {
	p := &publisher{name: name, clients: clients, log: log, changed: make(chan struct{}, 1)}
	changed := func() { notify(p.changed) }
	p.namespaces = &mirror[bool]{
		health: health{what: "namespaces", log: log}, changed: changed, parts: map[cache.ObjectName]bool{},
		part: func(o metav1.Object) bool { return o.GetDeletionTimestamp() == nil && !isSystem(o.GetName()) },
	}
	p.configMaps = &mirror[string]{
		health: health{what: "ConfigMaps " + name, log: log}, changed: changed, parts: map[cache.ObjectName]string{},
		part: func(o metav1.Object) string {
			if c, ok := o.(*corev1.ConfigMap); ok {
				return c.Data[rootKey]
			}
			return ""
		},
	}
	return p
}

// publish sets what to publish.
func (p *publisher) publish(roots string) {
	p.mu.Lock()
	p.roots = roots
	p.mu.Unlock()
	notify(p.changed)
}

// doubt sets whether other replicas may know newer certificates. Then ConfigMaps that exist are left to
// them.
func (p *publisher) doubt(unsure bool) {
	p.mu.Lock()
	p.unsure = unsure
	p.mu.Unlock()
	notify(p.changed)
}

// missing returns the number of namespaces that lack the current certificates.
func (p *publisher) missing() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.absent
}

func (p *publisher) status() []source.Status {
	return []source.Status{p.namespaces.status(), p.configMaps.status()}
}

// run keeps the ConfigMaps until ctx ends.
func (p *publisher) run(ctx context.Context) {
	var group sync.WaitGroup
	defer group.Wait()
	group.Go(func() { follow(ctx, namespaceLister(p.clients.metadata), p.namespaces, &p.namespaces.health) })
	group.Go(func() {
		follow(ctx, namedLister(p.clients.core, configMaps, cache.NewObjectName("", p.name), &corev1.ConfigMap{}), p.configMaps, &p.configMaps.health)
	})
	logged := ""
	keepUp(ctx, p.changed, p.pass, func(err error) { logged = p.note(err, logged) })
}

// keepUp calls pass after each change, and every recheck, until ctx ends. After an error it calls it again
// earlier. note gets what each call returns.
func keepUp(ctx context.Context, changed <-chan struct{}, pass func(context.Context) error, note func(error)) {
	backoff := retry()
	timer := time.NewTimer(recheck)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-timer.C:
		}
		err := pass(ctx)
		if ctx.Err() != nil {
			return
		}
		note(err)
		if err != nil {
			timer.Reset(backoff.Step())
			continue
		}
		backoff = retry()
		timer.Reset(recheck)
	}
}

// note logs an error unless it was logged, and returns what is logged now.
func (p *publisher) note(err error, logged string) string {
	switch {
	case err == nil && logged != "":
		p.log.Info("the root certificate is in all namespaces again", "configmap", p.name)
		return ""
	case err != nil && err.Error() != logged:
		p.log.Error("the root certificate is missing in namespaces, and new agents there cannot connect", "configmap", p.name, "error", err)
		return err.Error()
	}
	return logged
}

// pass creates the ConfigMaps that are missing, and changes those that have other certificates. It
// returns an error if that has failed for a namespace.
func (p *publisher) pass(ctx context.Context) error {
	p.mu.Lock()
	roots, unsure := p.roots, p.unsure
	p.mu.Unlock()
	namespaces, ok := p.namespaces.all()
	published, ok2 := p.configMaps.all()
	if roots == "" || !ok || !ok2 {
		return nil
	}
	failed, wrote := 0, 0
	var first error
	for _, key := range slices.SortedFunc(maps.Keys(namespaces), func(a, b cache.ObjectName) int { return strings.Compare(a.Name, b.Name) }) {
		namespace := key.Name
		text, exists := published[cache.NewObjectName(namespace, p.name)]
		if !namespaces[key] || exists && (unsure || text == roots) {
			continue
		}
		done, err := p.write(ctx, namespace, roots, exists)
		if done {
			wrote++
		}
		if err == nil {
			continue
		}
		if failed++; first == nil {
			first = fmt.Errorf("%s: %w%s", namespace, err, adviceForRole(err))
		}
	}
	p.mu.Lock()
	p.absent = failed
	p.mu.Unlock()
	if wrote > 0 {
		p.log.Info("the root certificate was published", "configmap", p.name, "namespaces", wrote)
	}
	return first
}

// write creates a ConfigMap, or changes its certificates. What other programs have added to it stays. If
// another replica was first, or the namespace is being deleted, done is false without an error: the
// publisher sees both soon.
func (p *publisher) write(ctx context.Context, namespace, roots string, exists bool) (done bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	data := map[string]string{rootKey: roots}
	if exists {
		text, err := json.Marshal(map[string]any{"data": data})
		if err != nil {
			return false, err
		}
		err = p.clients.patch(ctx, configMaps, cache.NewObjectName(namespace, p.name), text)
		return err == nil, ignore(err, apierrors.IsNotFound)
	}
	err = p.clients.create(ctx, configMaps, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: p.name, Labels: labels()}, Data: data,
	})
	return err == nil, ignore(err, apierrors.IsAlreadyExists, apierrors.IsNotFound, func(err error) bool {
		return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
	})
}

// ignore returns err, or nil if it is one of some kinds.
func ignore(err error, kinds ...func(error) bool) error {
	if err != nil && slices.ContainsFunc(kinds, func(is func(error) bool) bool { return is(err) }) {
		return nil
	}
	return err
}

// notify puts an element into a channel that holds at most one.
func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // there is one already
	}
}
