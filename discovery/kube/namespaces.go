package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"

	"github.com/nametap/nametap/discovery/source"
)

// A namespaceReader follows the labels and annotations of namespaces. Without it, each new pod would need a request to
// the API server.
type namespaceReader struct {
	client   metadata.Interface
	mirrored *mirror[labelled]
}

// A labelled has the labels and annotations of an object.
type labelled struct{ labels, annotations map[string]string }

// labelledPart returns the labels and annotations of an object. It leaves out kubectl's annotation with the last applied
// manifest, which may be long.
func labelledPart(o metav1.Object) labelled {
	annotations := maps.Clone(o.GetAnnotations())
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	return labelled{o.GetLabels(), annotations}
}

// NewNamespaces returns the namespaces of the API server.
func (a *Access) NewNamespaces(log *slog.Logger) (source.Namespaces, error) {
	client, err := metadata.NewForConfig(a.config)
	if err != nil {
		return nil, fmt.Errorf("reading namespaces: %w", err)
	}
	return &namespaceReader{client, newMirror("namespaces of pods", log, func() {}, labelledPart)}, nil
}

// Run follows the namespaces until ctx ends.
func (n *namespaceReader) Run(ctx context.Context) {
	syncStore(ctx, namespaceLister(n.client), n.mirrored, &n.mirrored.health)
}

// Read returns the labels and annotations of a namespace. It asks the API server for a namespace that is not known yet.
func (n *namespaceReader) Read(ctx context.Context, name string) (labels, annotations map[string]string, err error) {
	n.mirrored.mu.Lock()
	known, ok := n.mirrored.parts[cache.ObjectName{Name: name}]
	n.mirrored.mu.Unlock()
	if ok {
		return known.labels, known.annotations, nil
	}
	resource := n.client.Resource(corev1.SchemeGroupVersion.WithResource("namespaces"))
	list, err := resource.List(ctx, metav1.ListOptions{FieldSelector: nameSelector(name)}) // the role permits no get
	switch {
	case err != nil:
		return nil, nil, fmt.Errorf("%w%s", err, ifRefused(err, ": let nametap-discovery list and watch namespaces, see docs/discovery.md"))
	case len(list.Items) == 0:
		return nil, nil, fmt.Errorf("there is no namespace %q", name)
	}
	known = labelledPart(&list.Items[0])
	return known.labels, known.annotations, nil
}
