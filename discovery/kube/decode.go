package kube

import (
	"fmt"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
)

// slim is an object reduced to what the tables need. It takes the place of the whole object in
// client-go until it is in the feed.
type slim struct {
	object object.Object
	errs   []object.Error // what is wrong with it is left out of the object
	// version is the resource's version when the object became what it is, or was removed; 0 if
	// unknown.
	version uint64
}

// GetObjectMeta returns the part of the metadata by which client-go tells objects apart.
func (s *slim) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: s.object.Key.Namespace, Name: s.object.Key.Name}
}

// reduce returns the slim form of an object from client-go.
func (t structs) reduce(whole any) (*slim, error) {
	switch o := whole.(type) {
	case *slim:
		return o, nil
	case *corev1.Service:
		return t.decode(object.KindService, o, o), nil
	case *discoveryv1.EndpointSlice:
		return t.decode(object.KindEndpointSlice, o, o), nil
	case *metav1.PartialObjectMetadata:
		return reduceNamespace(o), nil
	case *corev1.ConfigMap:
		return reduceMesh(o), nil
	case *unstructured.Unstructured:
		switch kind := o.GetKind(); kind {
		case object.KindServiceEntry, object.KindSidecar, object.KindServiceImport:
			return t.decode(kind, o, o.Object), nil
		}
		return nil, fmt.Errorf("unexpected object of kind %q", o.GetKind())
	}
	return nil, fmt.Errorf("unexpected object of type %T", whole)
}

func newSlim(kind string, o metav1.Object) *slim {
	namespace, name := strings.Clone(o.GetNamespace()), strings.Clone(o.GetName())
	return &slim{object: object.Object{Key: object.Key{Kind: kind, Namespace: namespace, Name: name}}}
}

// decode returns the slim form of an object, whose fields are in from.
func (t structs) decode(kind string, o metav1.Object, from any) *slim {
	s := newSlim(kind, o)
	root := decode.NewField(t.valueOf(reflect.ValueOf(from)), "", func(f decode.Field, message string) { s.fail(f.Path, "%s", message) })
	decode.Decode(root, &s.object)
	// Only Pods need these, and only directories have Pods.
	if s.object.Service != nil {
		s.object.Service.Selector = nil
	}
	if s.object.Slice != nil {
		for i := range s.object.Slice.Endpoints {
			s.object.Slice.Endpoints[i].Pod = ""
		}
	}
	return s
}

// fail records an error in a field, once.
func (s *slim) fail(field, format string, args ...any) {
	s.errs = object.AppendError(s.errs, object.Error{File: s.object.Key.String(), Field: field, Msg: fmt.Sprintf(format, args...), Object: s.object.Key})
}
