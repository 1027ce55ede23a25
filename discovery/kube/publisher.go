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
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/logonce"
)

const (
	// rootKey is the key of the certificates in a ConfigMap, as in Istio's istio-ca-root-cert. Agents look for a file
	// with this name.
	rootKey = "root-cert.pem"
	// maxWriters bounds the number of other programs that a line of the log names.
	maxWriters = 5
)

// isSystem reports whether a namespace is one of Kubernetes' own. As in istiod, these namespaces get no ConfigMap.
func isSystem(namespace string) bool {
	return namespace == metav1.NamespaceSystem || namespace == metav1.NamespacePublic || namespace == corev1.NamespaceNodeLease
}

// A publisher keeps the certificates of the authorities in a ConfigMap of each namespace, because a pod can only mount
// ConfigMaps of its own namespace.
type publisher struct {
	name       string // of the ConfigMaps
	clients    *clients
	log        *slog.Logger
	namespaces *mirror[bool] // whether a namespace can get a ConfigMap
	configMaps *mirror[rootMap]
	changed    chan struct{}

	// The fields below are owned by the goroutine of run.
	paces    map[string]*pace // by namespace, of ConfigMaps that were written lately
	failure  logonce.Failure  // of the last pass
	blamed   string           // the programs that the log named last
	blamedAt time.Time        // when the log last named programs

	mu     sync.Mutex
	roots  string // to publish; "" if there are none yet
	unsure bool   // other replicas may know newer roots
	absent int    // namespaces that lacked the roots after the last pass
}

func newPublisher(name string, clients *clients, log *slog.Logger) *publisher {
	p := &publisher{name: name, clients: clients, log: log, changed: make(chan struct{}, 1), paces: map[string]*pace{}}
	changed := func() { chans.Wake(p.changed) }
	p.namespaces = newMirror("namespaces", log, changed, func(o metav1.Object) bool { return o.GetDeletionTimestamp() == nil && !isSystem(o.GetName()) })
	p.configMaps = newMirror("ConfigMaps "+name, log, changed, rootMapOf)
	return p
}

// publish sets the certificates to publish.
func (p *publisher) publish(roots string) {
	p.mu.Lock()
	p.roots = roots
	p.mu.Unlock()
	chans.Wake(p.changed)
}

// doubt sets whether other replicas may know newer certificates. While they may, ConfigMaps that exist are not changed.
func (p *publisher) doubt(unsure bool) {
	p.mu.Lock()
	p.unsure = unsure
	p.mu.Unlock()
	chans.Wake(p.changed)
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
	group.Go(func() { syncStore(ctx, namespaceLister(p.clients.metadata), p.namespaces, &p.namespaces.health) })
	group.Go(func() {
		syncStore(ctx, namedLister(p.clients.core, configMaps, cache.NewObjectName("", p.name), &corev1.ConfigMap{}), p.configMaps, &p.configMaps.health)
	})
	keepUp(ctx, p.changed, p.reconcile, p.logResult)
}

// reconcile creates missing ConfigMaps, and changes ConfigMaps with other certificates. The result next is the time
// until the next pass, and err is the first error of a write. If another program writes a ConfigMap, too, reconcile
// writes that ConfigMap only after a pause.
func (p *publisher) reconcile(ctx context.Context) (next time.Duration, err error) {
	p.mu.Lock()
	roots, unsure := p.roots, p.unsure
	p.mu.Unlock()
	namespaces, ok := p.namespaces.all()
	published, ok2 := p.configMaps.all()
	if roots == "" || !ok || !ok2 {
		return recheck, nil
	}
	maps.DeleteFunc(p.paces, func(namespace string, w *pace) bool {
		return w.untilQuiet() < 0 || !namespaces[cache.NewObjectName("", namespace)]
	})
	next = recheck
	failed, wrote := 0, 0
	for _, key := range slices.SortedFunc(maps.Keys(namespaces), func(a, b cache.ObjectName) int { return strings.Compare(a.Name, b.Name) }) {
		namespace := key.Name
		current, exists := published[cache.NewObjectName(namespace, p.name)]
		if !namespaces[key] || exists && (unsure || current.text == roots) {
			continue
		}
		pace := p.paceOf(namespace)
		if left := pace.left(roots); left > 0 {
			next = min(next, left)
			continue
		}
		done, failure := p.write(ctx, namespace, roots, exists)
		if done {
			pace.count(roots)
			wrote++
		}
		if failure == nil {
			continue
		}
		if failed++; err == nil {
			err = fmt.Errorf("%s: %w%s", namespace, failure, adviceForRole(failure))
		}
	}
	disputed, lasts := p.disputes(published)
	p.mu.Lock()
	p.absent = failed + disputed
	p.mu.Unlock()
	if wrote > 0 {
		p.log.Info("the root certificate was published", "configmap", p.name, "namespaces", wrote)
	}
	return min(next, lasts), err
}

// logResult logs an error if it differs from the last error. It also logs when the errors have ended.
func (p *publisher) logResult(err error) {
	if p.failure.Ended(err) {
		p.log.Info("the root certificate is in all namespaces again", "configmap", p.name)
	}
	if p.failure.Differs(err) {
		p.log.Error("the root certificate is missing in namespaces, and new agents there cannot connect", "configmap", p.name, "error", err)
	}
}

// paceOf returns the pace of the ConfigMap of a namespace.
func (p *publisher) paceOf(namespace string) *pace {
	w := p.paces[namespace]
	if w == nil {
		w = new(pace)
		p.paces[namespace] = w
	}
	return w
}

// disputes returns the number of ConfigMaps that another program writes again and again, and how long it takes until
// the first of these disputes ends. It logs the names of the programs when the names change, but at most once in
// quietTime, because owners of namespaces choose these names.
func (p *publisher) disputes(published map[cache.ObjectName]rootMap) (disputed int, lasts time.Duration) {
	var writers []string
	lasts = recheck
	for namespace, w := range p.paces {
		if !w.disputed() {
			continue
		}
		disputed++
		lasts = min(lasts, w.untilQuiet())
		writers = append(writers, published[cache.NewObjectName(namespace, p.name)].writers...)
	}
	slices.Sort(writers)
	writers = slices.Compact(writers)
	writers = writers[:min(len(writers), maxWriters)]
	blamed := fmt.Sprint(writers)
	switch {
	case disputed == 0:
		p.blamed = ""
		return 0, lasts
	case blamed == p.blamed || time.Since(p.blamedAt) < quietTime:
		return disputed, lasts
	}
	p.blamed, p.blamedAt = blamed, time.Now()
	advice := "let that program leave its key " + rootKey + " alone, or name another ConfigMap (--tls-ca-configmap)"
	if len(writers) == 0 {
		advice = "another installation of nametap-discovery, with another certificate, has the same --tls-ca-configmap: name another ConfigMap there"
	}
	p.log.Error("another program writes the ConfigMaps with the root certificate again and again, and new agents may not connect meanwhile: "+advice,
		"configmap", p.name, "field_managers", writers, "namespaces", disputed)
	return disputed, lasts
}

// write creates a ConfigMap, or changes the certificates in it; its other keys stay. If another replica was first, or
// the namespace is being deleted, done is false and err is nil. In both cases, the publisher's mirrors soon show the
// change, and the next pass sees it.
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

// A rootMap has the parts of a ConfigMap that a publisher reads.
type rootMap struct {
	text    string   // the certificates
	writers []string // other programs that own them
}

func rootMapOf(o metav1.Object) rootMap {
	c, ok := o.(*corev1.ConfigMap)
	if !ok {
		return rootMap{}
	}
	return rootMap{c.Data[rootKey], writersOf(c.ManagedFields, rootKey)}
}
