package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// The selectors of EndpointSlices. The API server selects the slices of headless Services by a label. Slices that are
// written by hand, or by another controller, may lack the label.
const (
	headlessSlices = "service.kubernetes.io/headless"
	foreignSlices  = "!service.kubernetes.io/headless,endpointslice.kubernetes.io/managed-by!=endpointslice-controller.k8s.io"
)

// clients are the clients of one API server.
type clients struct {
	core, discovery *rest.RESTClient
	dynamic         dynamic.Interface
	metadata        metadata.Interface
}

// newClients returns the clients of an API server. Built-in types come as protobuf.
func newClients(config *rest.Config) (*clients, error) {
	binary := rest.CopyConfig(config)
	binary.ContentType, binary.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf
	c := new(clients)
	var err error
	if c.core, err = typedClient(binary, corev1.SchemeGroupVersion, corev1.AddToScheme); err != nil {
		return nil, err
	}
	if c.discovery, err = typedClient(binary, discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme); err != nil {
		return nil, err
	}
	if c.dynamic, err = dynamic.NewForConfig(config); err != nil {
		return nil, err
	}
	c.metadata, err = metadata.NewForConfig(config)
	return c, err
}

// typedClient returns a client for the built-in types of one version of an API. The parameter add is the function
// AddToScheme of the package that has these types.
func typedClient(config *rest.Config, version schema.GroupVersion, add func(*runtime.Scheme) error) (*rest.RESTClient, error) {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	if err := add(scheme); err != nil {
		return nil, err
	}
	c := rest.CopyConfig(config)
	if c.APIPath, c.GroupVersion = "/apis", &version; version.Group == "" {
		c.APIPath = "/api"
	}
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	return rest.RESTClientFor(c)
}

// servedVersion returns the version of a custom resource that the API server serves; if there are several, the first in the
// order of preference. The preferred version of the group may lack the resource. If the resource is not served in any
// version, served is false.
func (c *clients) servedVersion(ctx context.Context, resource schema.GroupResource) (version schema.GroupVersionResource, served bool, err error) {
	ask := func(path string, into any) error {
		text, err := c.core.Get().AbsPath(path).SetHeader("Accept", runtime.ContentTypeJSON).DoRaw(ctx)
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return json.Unmarshal(text, into)
	}
	var group metav1.APIGroup
	if err := ask("/apis/"+resource.Group, &group); err != nil {
		return version, false, fmt.Errorf("asking for the versions of %s: %w", resource.Group, err)
	}
	for _, v := range group.Versions { // preferred versions first
		var list metav1.APIResourceList
		if err := ask("/apis/"+v.GroupVersion, &list); err != nil {
			return version, false, fmt.Errorf("asking for the resources of %s: %w", v.GroupVersion, err)
		}
		if slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource.Resource }) {
			return resource.WithVersion(v.Version), true, nil
		}
	}
	return version, false, nil
}

// A lister lists and watches one resource, as client-go's ListWatch does.
type lister struct {
	kind  any // an object of the expected type
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

// typedLister lists a built-in resource in all namespaces. The parameter labels is a selector; an
// empty string selects all objects.
func typedLister(client *rest.RESTClient, resource, labels string, kind any) lister {
	return requestLister(kind, func(options metav1.ListOptions) *rest.Request {
		options.LabelSelector = labels
		return client.Get().Resource(resource).VersionedParams(&options, metav1.ParameterCodec)
	})
}

// namedLister lists those objects of a built-in resource that have a given name. If the name includes a namespace, it
// lists only that namespace, otherwise all. A role whose resourceNames has only this name suffices for such a list.
func namedLister(client *rest.RESTClient, resource string, name cache.ObjectName, kind any) lister {
	return requestLister(kind, func(options metav1.ListOptions) *rest.Request {
		options.FieldSelector = nameSelector(name.Name)
		return client.Get().Resource(resource).NamespaceIfScoped(name.Namespace, name.Namespace != "").VersionedParams(&options, metav1.ParameterCodec)
	})
}

// nameSelector returns the field selector of objects with a name.
func nameSelector(name string) string {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
}

// requestLister lists objects with the requests that the function request returns.
func requestLister(kind any, request func(metav1.ListOptions) *rest.Request) lister {
	return lister{
		kind: kind,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return request(options).Do(ctx).Get()
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.Watch = true
			return request(options).Watch(ctx)
		},
	}
}

// customLister lists a custom resource in all namespaces.
func (c *clients) customLister(resource schema.GroupVersionResource) lister {
	r := c.dynamic.Resource(resource)
	return lister{
		kind: &unstructured.Unstructured{},
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return r.List(ctx, options)
		},
		watch: r.Watch,
	}
}

// networkLister lists the metadata of one namespace. A label of this namespace names the network of the cluster.
func (c *clients) networkLister(namespace string) lister {
	return metadataLister(c.metadata.Resource(corev1.SchemeGroupVersion.WithResource("namespaces")), nameSelector(namespace))
}

// namespaceLister lists the metadata of all namespaces.
func namespaceLister(client metadata.Interface) lister {
	return metadataLister(client.Resource(corev1.SchemeGroupVersion.WithResource("namespaces")), "")
}

// metadataLister lists the metadata of objects of a resource. The parameter selector is a field selector; an empty one
// selects all objects.
func metadataLister(r metadata.ResourceInterface, selector string) lister {
	only := func(options metav1.ListOptions) metav1.ListOptions {
		options.FieldSelector = selector
		return options
	}
	return lister{
		kind: &metav1.PartialObjectMetadata{},
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return r.List(ctx, only(options))
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return r.Watch(ctx, only(options))
		},
	}
}

// onNotFound returns a lister like l. It calls callback with the error if the API server does not have the
// resource.
func (l lister) onNotFound(callback func(error)) lister {
	note := func(err error) {
		if apierrors.IsNotFound(err) {
			callback(err)
		}
	}
	return lister{
		kind: l.kind,
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			all, err := l.list(ctx, options)
			note(err)
			return all, err
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			events, err := l.watch(ctx, options)
			note(err)
			return events, err
		},
	}
}
