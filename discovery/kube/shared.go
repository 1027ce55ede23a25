package kube

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// sharedClients read and write the objects that replicas share.
type sharedClients struct {
	core     *rest.RESTClient
	metadata metadata.Interface
}

// newSharedClients returns the clients of an API server.
func newSharedClients(a *Access) (*sharedClients, error) {
	c := new(sharedClients)
	var err error
	if c.core, err = typedClient(a.config, corev1.SchemeGroupVersion, corev1.AddToScheme); err != nil {
		return nil, err
	}
	c.metadata, err = metadata.NewForConfig(a.config)
	return c, err
}

// A namespaced object has a namespace.
type namespaced interface {
	runtime.Object
	metav1.Object
}

// create creates an object.
func (c *sharedClients) create(ctx context.Context, resource string, o namespaced) error {
	return c.core.Post().Resource(resource).Namespace(o.GetNamespace()).Body(o).Do(ctx).Error()
}

// update changes an object, unless it has changed since it was read.
func (c *sharedClients) update(ctx context.Context, resource string, o namespaced) error {
	return c.core.Put().Resource(resource).Namespace(o.GetNamespace()).Name(o.GetName()).Body(o).Do(ctx).Error()
}

// patch changes the fields of an object that are in a text in JSON (RFC 7396).
func (c *sharedClients) patch(ctx context.Context, resource string, o cache.ObjectName, text []byte) error {
	return c.core.Patch(types.MergePatchType).Resource(resource).Namespace(o.Namespace).Name(o.Name).Body(text).Do(ctx).Error()
}
