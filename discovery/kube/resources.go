package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// The paths of built-in resources.
const (
	pathServices   = "/api/v1/services"
	pathSlices     = "/apis/discovery.k8s.io/v1/endpointslices"
	pathNamespaces = "/api/v1/namespaces"
)

// The selectors of EndpointSlices. The API server selects the slices of headless Services by a label. Slices that are
// written by hand, or by another controller, may lack the label.
const (
	headlessSlices = "service.kubernetes.io/headless"
	foreignSlices  = "!service.kubernetes.io/headless,endpointslice.kubernetes.io/managed-by!=endpointslice-controller.k8s.io"
)

// A resource is a list of objects at an API server.
type resource struct {
	client         *rest.RESTClient
	name           string // in logs and in the status
	kind           string // of the objects
	path           string
	labels, fields string          // selectors; empty for all objects
	missing        func(err error) // called if the API server does not have the resource; may be nil
}

// selectName returns the field selector of objects with a name. A role whose resourceNames has only this name suffices to
// list them.
func selectName(name string) string {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
}

// request returns a request for the objects.
func (r resource) request(options metav1.ListOptions) *rest.Request {
	options.LabelSelector, options.FieldSelector = r.labels, r.fields
	return r.client.Get().AbsPath(r.path).VersionedParams(&options, metav1.ParameterCodec)
}

// do sends a request once, and returns the body of the response. While the API server starts, it asks to be asked again after
// 5 s, and client-go would wait that long ten times, without a line in the log. The code here that sends requests reports
// failures itself, and has pauses of its own.
func do(ctx context.Context, r *rest.Request) ([]byte, error) {
	result := r.MaxRetries(0).Do(ctx)
	if err := result.Error(); err != nil {
		return nil, err
	}
	return result.Raw()
}

// list lists the objects. The function decode decodes the JSON of one.
func (r resource) list(ctx context.Context, options metav1.ListOptions, decode func([]byte) runtime.Object) (*metav1.List, error) {
	text, err := do(ctx, r.request(options))
	if err != nil {
		return nil, err
	}
	var from struct {
		Metadata metav1.ListMeta   `json:"metadata"`
		Items    []json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(text, &from); err != nil {
		return nil, fmt.Errorf("decoding the list %s: %w", r.path, err)
	}
	found := &metav1.List{ListMeta: from.Metadata, Items: make([]runtime.RawExtension, len(from.Items))}
	for i, data := range from.Items {
		found.Items[i].Object = decode(data)
	}
	return found, nil
}

// watch watches the objects.
func (r resource) watch(ctx context.Context, options metav1.ListOptions, decode func([]byte) runtime.Object) (watch.Interface, error) {
	options.Watch = true
	body, err := r.request(options).MaxRetries(0).Stream(ctx)
	if err != nil {
		return nil, err
	}
	from := events{body, json.NewDecoder(body), decode}
	return watch.NewStreamWatcherWithLogger(klog.FromContext(ctx), from, apierrors.NewClientErrorReporter(http.StatusInternalServerError, http.MethodGet, "watch")), nil
}

// events are the events of a watch.
type events struct {
	body   io.Closer
	stream *json.Decoder
	decode func([]byte) runtime.Object
}

// Decode returns the next event.
func (e events) Decode() (watch.EventType, runtime.Object, error) {
	var next struct {
		Type   watch.EventType `json:"type"`
		Object json.RawMessage `json:"object"`
	}
	if err := e.stream.Decode(&next); err != nil || next.Type == "" { // then client-go would ask again at once, and say nothing
		return "", nil, cmp.Or(err, errors.New("want an event of a watch"))
	}
	if next.Type == watch.Error {
		status := new(metav1.Status)
		return next.Type, status, json.Unmarshal(next.Object, status)
	}
	return next.Type, e.decode(next.Object), nil
}

// Close ends the watch.
func (e events) Close() { _ = e.body.Close() }

// servedVersion returns the version of a custom resource that the API server serves; if there are several, the first in the
// order of preference. The preferred version of the group may lack the resource. If the resource is not served in any
// version, served is false.
func servedVersion(ctx context.Context, client *rest.RESTClient, group, resource string) (version string, served bool, err error) {
	ask := func(path string, into any) error {
		text, err := do(ctx, client.Get().AbsPath(path))
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return json.Unmarshal(text, into)
	}
	var found metav1.APIGroup
	if err := ask("/apis/"+group, &found); err != nil {
		return "", false, fmt.Errorf("asking for the versions of %s: %w", group, err)
	}
	for _, v := range found.Versions { // preferred versions first
		var list metav1.APIResourceList
		if err := ask("/apis/"+v.GroupVersion, &list); err != nil {
			return "", false, fmt.Errorf("asking for the resources of %s: %w", v.GroupVersion, err)
		}
		if slices.ContainsFunc(list.APIResources, func(r metav1.APIResource) bool { return r.Name == resource }) {
			return v.Version, true, nil
		}
	}
	return "", false, nil
}
