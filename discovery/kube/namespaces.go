package kube

import (
	"context"
	"fmt"
	"log/slog"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// A namespaceReader follows the labels and annotations of namespaces. Without it, each new pod would need a request to
// the API server.
type namespaceReader struct{ *store[labelled] }

// A labelled has the labels and annotations of an object.
type labelled struct{ labels, annotations map[string]string }

// NewNamespaces returns the namespaces of the API server.
func (a *Access) NewNamespaces(log *slog.Logger) source.Namespaces {
	r := resource{client: a.client, name: "namespaces of pods", kind: object.KindNamespace, path: pathNamespaces}
	return &namespaceReader{newStore(r, log, func() {}, metadataOnly(func(m decode.Meta) labelled {
		delete(m.Annotations, "kubectl.kubernetes.io/last-applied-configuration") // it may be long
		return labelled{m.Labels, m.Annotations}
	}))}
}

// Run follows the namespaces until ctx ends.
func (n *namespaceReader) Run(ctx context.Context) { n.run(ctx) }

// Read returns the labels and annotations of a namespace. It asks the API server for a namespace that is not known yet.
func (n *namespaceReader) Read(ctx context.Context, name string) (labels, annotations map[string]string, err error) {
	if known := n.get(object.Key{Kind: object.KindNamespace, Name: name}); known != nil {
		return known.labels, known.annotations, nil
	}
	one := n.resource
	one.fields = selectName(name)
	var found *labelled
	_, err = one.list(ctx, metav1.ListOptions{}, func(data []byte) runtime.Object { // the role permits no get
		i := n.newItem(data)
		found = i.value
		return i
	})
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("%w%s", err, ifRefused(err, ": let nametap-discovery list and watch namespaces, see docs/discovery.md"))
	case found == nil:
		return nil, nil, fmt.Errorf("there is no namespace %q", name)
	}
	return found.labels, found.annotations, nil
}
