package kube

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
)

// structs has the members of each struct type by their names in JSON.
type structs map[reflect.Type]map[string]member

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
	case *corev1.Namespace:
		return reduceCluster(o), nil
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

// decode returns the slim form of the object o of a kind. The parameter from has the fields of o.
func (t structs) decode(kind string, o metav1.Object, from any) *slim {
	s := newSlim(kind, o)
	root := decode.NewField(t.valueOf(reflect.ValueOf(from)), "", func(f decode.Field, message string) { s.fail(f.Path, "%s", message) })
	decode.Decode(root, &s.object)
	// These fields are only used with Pods, and only directories have Pods.
	if s.object.Service != nil {
		s.object.Service.Selector = nil
	}
	if s.object.Entry != nil {
		s.object.Entry.Selector = nil
	}
	if s.object.Slice != nil {
		for i := range s.object.Slice.Endpoints {
			s.object.Slice.Endpoints[i].Pod = ""
		}
	}
	return s
}

// valueOf returns the value of a part of an object.
func (t structs) valueOf(v reflect.Value) value {
	for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
		v = v.Elem() // invalid for nil
	}
	if v.Kind() == reflect.Struct && v.Type() == reflect.TypeFor[intstr.IntOrString]() {
		either := v.Interface().(intstr.IntOrString) //nolint:forcetypeassert // just seen
		if v = reflect.ValueOf(either.StrVal); either.Type == intstr.Int {
			v = reflect.ValueOf(either.IntVal)
		}
	}
	return value{v, t}
}

// members returns the members of a struct type.
func (t structs) members(typ reflect.Type) map[string]member {
	if known, ok := t[typ]; ok {
		return known
	}
	all := map[string]member{}
	for i := range typ.NumField() {
		tag := strings.Split(typ.Field(i).Tag.Get("json"), ",")
		if tag[0] != "" {
			all[tag[0]] = member{i, len(tag) > 1 && tag[1] == "omitempty"}
		}
	}
	t[typ] = all
	return all
}

// A member is a field of a struct type.
type member struct {
	index     int
	omitEmpty bool // the zero value means that the member is absent
}

// reduceNamespace returns the slim form of a namespace. A label of the namespace names the network.
func reduceNamespace(o *metav1.PartialObjectMetadata) *slim {
	s := newSlim(object.KindNamespace, o)
	s.object.Namespace = &object.Namespace{Network: strings.Clone(o.Labels[object.LabelNetwork])}
	return s
}

// reduceCluster returns what identifies the cluster, from its namespace kube-system.
func reduceCluster(o *corev1.Namespace) *slim {
	s := newSlim(object.KindCluster, o)
	s.object.Cluster = &object.Cluster{UID: string(o.UID)}
	return s
}

// A value is a part of an object from client-go. The object is of one of the API's types, or a custom resource, which
// consists of maps, lists and scalars. Members are found by their names in JSON.
type value struct {
	rv      reflect.Value // neither a pointer nor an interface; invalid for null
	structs structs
}

// Kind returns the kind of the value.
func (v value) Kind() decode.Kind {
	switch v.rv.Kind() { //nolint:exhaustive // the API has no others
	case reflect.Invalid:
		return decode.Null
	case reflect.Struct, reflect.Map:
		return decode.Object
	case reflect.Slice:
		return decode.List
	case reflect.String:
		return decode.String
	case reflect.Bool:
		return decode.Boolean
	case reflect.Int, reflect.Int32, reflect.Int64:
		return decode.Integer
	case reflect.Float64:
		return decode.Number
	}
	return decode.Other
}

// Text returns a scalar as text.
func (v value) Text() string {
	switch v.rv.Kind() { //nolint:exhaustive // the others are rare
	case reflect.String:
		return v.rv.String()
	case reflect.Int, reflect.Int32, reflect.Int64:
		return strconv.FormatInt(v.rv.Int(), 10)
	}
	return fmt.Sprint(v.rv)
}

// Member returns the member with the given name of a struct or a map. It returns nil if there is no such member, and
// for null, a nil slice, or a zero value that JSON leaves out.
func (v value) Member(name string) (decode.Value, error) {
	var found reflect.Value
	if v.rv.Kind() == reflect.Map {
		found = v.rv.MapIndex(reflect.ValueOf(name))
	} else if m, ok := v.structs.members(v.rv.Type())[name]; ok {
		if found = v.rv.Field(m.index); m.omitEmpty && found.IsZero() {
			return nil, nil //nolint:nilnil // documented
		}
	}
	if !found.IsValid() {
		return nil, nil //nolint:nilnil // documented
	}
	if member := v.structs.valueOf(found); member.rv.IsValid() && (member.rv.Kind() != reflect.Slice || !member.rv.IsNil()) {
		return member, nil
	}
	return nil, nil //nolint:nilnil // documented
}

// Names returns the keys of a map.
func (v value) Names() []string {
	if v.rv.Kind() != reflect.Map {
		return nil
	}
	names := make([]string, 0, v.rv.Len())
	for _, key := range v.rv.MapKeys() {
		names = append(names, key.String())
	}
	return names
}

// Len returns the number of elements of a slice.
func (v value) Len() int { return v.rv.Len() }

// At returns an element of a slice.
func (v value) At(index int) decode.Value { return v.structs.valueOf(v.rv.Index(index)) }
