package kube

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"

	klabels "k8s.io/apimachinery/pkg/labels"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/chans"
)

// A selection applies the discovery selectors: it knows which namespaces count. While there are selectors, it follows
// the labels of namespaces.
type selection struct {
	namespaces resource
	changed    func() // called after each change, without the lock
	log        *slog.Logger
	woken      chan struct{} // has an element when selectors or labels have changed
	ready      chan struct{} // closed when it is known which namespaces count

	mu     sync.Mutex
	wanted []string // the selectors, in the form of kubectl's --selector
	known  bool     // wanted was set
	inUse  bool     // ready is closed, and names was set
	used   []string // the selectors by which names was set
	names  namespaces
	labels *store[klabels.Set] // of all namespaces; nil while there are no selectors

	unwatch func() // ends the watch of labels; owned by the goroutine of run
}

func newSelection(namespaces resource, changed func(), log *slog.Logger) *selection {
	return &selection{
		namespaces: namespaces, changed: changed, log: log, woken: make(chan struct{}, 1), ready: make(chan struct{}), unwatch: func() {},
	}
}

// current returns the namespaces that count.
func (n *selection) current() namespaces {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names
}

// run follows the selectors and the labels until ctx ends. It may be called again then.
func (n *selection) run(ctx context.Context) {
	defer func() { n.unwatch() }()
	chans.Wake(n.woken)
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.woken:
			n.update(ctx)
		}
	}
}

// update applies the wanted selectors to the labels. Until the labels of all namespaces are known, the same namespaces
// count as before.
func (n *selection) update(ctx context.Context) {
	n.mu.Lock()
	wanted, known, followed := n.wanted, n.known, n.labels
	n.mu.Unlock()
	switch {
	case !known:
	case len(wanted) == 0:
		n.unwatch()
		n.unwatch = func() {}
		n.use(wanted, nil, nil)
	case followed == nil:
		n.watch(ctx)
	default:
		if all, synced := followed.all(); synced {
			n.use(wanted, matching(wanted, all), followed)
		}
	}
}

// watch begins to follow the labels.
func (n *selection) watch(ctx context.Context) {
	m := newStore(n.namespaces, n.log, func() { chans.Wake(n.woken) }, metadataOnly(func(m decode.Meta) klabels.Set { return m.Labels }))
	n.mu.Lock()
	n.labels = m
	n.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { m.run(ctx) })
	n.unwatch = func() {
		cancel()
		running.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		n.labels = nil
	}
}

// use sets the namespaces that count. The parameter names has these namespaces, which the selectors have selected. The
// parameter followed has the labels that were used for that; nil if there are no selectors.
func (n *selection) use(selectors []string, names namespaces, followed *store[klabels.Set]) {
	n.mu.Lock()
	first, same := !n.inUse, (n.names == nil) == (names == nil) && maps.Equal(n.names, names)
	if !slices.Equal(n.used, selectors) {
		n.log.Info("the discovery selectors have changed", "selectors", selectors, "namespaces", len(names))
	}
	n.inUse, n.used, n.names, n.labels = true, selectors, names, followed
	n.mu.Unlock()
	switch {
	case first:
		close(n.ready)
	case !same:
		n.changed()
	}
}

// status returns the state of the labels, if they are followed.
func (n *selection) status() []source.Status {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.labels == nil {
		return nil
	}
	return []source.Status{n.labels.status()}
}

// namespaces has the namespaces that count; nil for all. It does not change.
type namespaces map[string]bool

// include reports whether a namespace counts. Objects without a namespace always count.
func (n namespaces) include(namespace string) bool {
	return n == nil || namespace == "" || n[namespace]
}

// matching returns the names of the namespaces whose labels match one of the selectors.
func matching(selectors []string, all map[object.Key]*klabels.Set) namespaces {
	var parsed []klabels.Selector
	for _, text := range selectors {
		if s, err := klabels.Parse(text); err == nil { // newMesh has checked it
			parsed = append(parsed, s)
		}
	}
	names := namespaces{}
	for key, namespace := range all {
		if slices.ContainsFunc(parsed, func(s klabels.Selector) bool { return s.Matches(*namespace) }) {
			names[key.Name] = true
		}
	}
	return names
}
