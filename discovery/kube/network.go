package kube

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/discovery/object"
)

// networkLister lists the metadata of the namespace whose label names the network of the cluster.
func (c *clients) networkLister(namespace string) lister {
	return metadataLister(c.metadata.Resource(corev1.SchemeGroupVersion.WithResource("namespaces")), nameSelector(namespace))
}

// reduceNamespace returns the network in the label of a namespace.
func reduceNamespace(o *metav1.PartialObjectMetadata) *slim {
	s := newSlim(object.KindNamespace, o)
	s.object.Namespace = &object.Namespace{Network: strings.Clone(o.Labels[object.LabelNetwork])}
	return s
}
