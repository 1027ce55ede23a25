package kube

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/nametap/nametap/discovery/source"
)

// Namespaces returns a function that asks the API server for the labels and annotations of a namespace. It lists
// namespaces of that name, because the publisher has the right to list them, and no other is needed then.
func (a *Access) Namespaces() (source.ReadNamespace, error) {
	config := rest.CopyConfig(a.config)
	config.Timeout = reviewTimeout
	client, err := typedClient(config, corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, fmt.Errorf("reading namespaces: %w", err)
	}
	return func(ctx context.Context, name string) (labels, annotations map[string]string, err error) {
		list := new(corev1.NamespaceList)
		options := &metav1.ListOptions{FieldSelector: nameSelector(name)}
		if err := client.Get().Resource("namespaces").VersionedParams(options, metav1.ParameterCodec).Do(ctx).Into(list); err != nil {
			return nil, nil, fmt.Errorf("%w%s", err, adviceFor(err))
		}
		if len(list.Items) == 0 {
			return nil, nil, fmt.Errorf("there is no namespace %q", name)
		}
		return list.Items[0].Labels, list.Items[0].Annotations, nil
	}, nil
}
