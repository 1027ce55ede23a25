// Package decode turns Kubernetes and Istio objects into the model that all sources share (package object). Every source
// has its objects as JSON: the API server sends it, and package files makes it of YAML. So an object means the same in
// all sources, and an error names the field in the same words.
//
// decode.go has [Decode]. forms.go has the fields that are read, a struct for each kind of object, and how they
// are checked.
package decode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"time"

	"github.com/nametap/nametap/discovery/object"
)

// Meta has the metadata of an object.
type Meta struct {
	Name              string            `json:"name"`
	Namespace         string            `json:"namespace"`
	UID               string            `json:"uid"`
	ResourceVersion   string            `json:"resourceVersion"`
	Labels            map[string]string `json:"labels"`
	Annotations       map[string]string `json:"annotations"`
	CreationTimestamp string            `json:"creationTimestamp"`
	DeletionTimestamp string            `json:"deletionTimestamp"`
}

// Created returns when the object was created; the zero time if that is not known.
func (m Meta) Created() time.Time {
	at, _ := time.Parse(time.RFC3339, m.CreationTimestamp) // the zero time after an error
	return at
}

// A form has the fields of a kind of object that are read, with their names in JSON.
type form interface {
	metadata() *Meta
	// decode sets the part of o that is of the form's kind. Invalid parts are left out. A broken object never shows a host
	// to more clients than its author wanted.
	decode(d *decoder, o *object.Object)
}

// newForm returns an empty form of a kind, and the API group of the kind. The form is nil if objects of the kind are not
// read.
func newForm(kind string) (f form, group string) {
	switch kind {
	case object.KindService:
		return new(service), ""
	case object.KindPod:
		return new(pod), ""
	case object.KindEndpointSlice:
		return new(endpointSlice), "discovery.k8s.io"
	case object.KindServiceEntry:
		return new(serviceEntry), "networking.istio.io"
	case object.KindSidecar:
		return new(sidecar), "networking.istio.io"
	case object.KindServiceImport:
		return new(serviceImport), "multicluster.x-k8s.io"
	}
	return nil, ""
}

// Group returns the API group of a kind of objects that are read.
func Group(kind string) (group string, read bool) {
	f, group := newForm(kind)
	return group, f != nil
}

// Decode decodes the JSON of an object, which must be of a kind that [Group] knows. If a field is not of the type that
// Kubernetes or Istio gives it, the result is an object without a part, and no host is made of it; only a Sidecar then
// shows no host.
func Decode(kind string, data []byte) (object.Object, Meta, []object.Error) {
	f, _ := newForm(kind)
	meta := f.metadata()
	err := json.Unmarshal(data, f)
	o := object.Object{Key: object.Key{Kind: kind, Namespace: cmp.Or(meta.Namespace, "default"), Name: meta.Name}} // as in kubectl
	d := &decoder{key: o.Key}
	if err == nil {
		d.checkNames(*meta)
		f.decode(d, &o)
		return o, *meta, d.errs
	}
	d.add(Mismatch(err, ""))
	if s, ok := f.(*sidecar); ok {
		labels := s.Spec.Selector.Labels
		maps.DeleteFunc(labels, func(_, value string) bool { return value == "" }) // the value that is no text is ""
		o.Sidecar = &object.Sidecar{Labels: labels, Created: meta.Created(), Egress: []object.EgressListener{}}
	}
	return o, *meta, d.errs
}

// A decoder collects what is wrong with an object.
type decoder struct {
	key  object.Key
	errs []object.Error
}

// fail notes an error in a field. The name of the field is formatted as in [fmt.Sprintf].
func (d *decoder) fail(err error, field string, args ...any) {
	d.add(object.Error{Field: fmt.Sprintf(field, args...), Msg: err.Error()})
}

func (d *decoder) add(e object.Error) {
	e.Object = d.key
	d.errs = object.AppendError(d.errs, e)
}

// checkNames checks the namespace and the name. The API server does the same with its objects, a directory does not.
func (d *decoder) checkNames(m Meta) {
	const want = "want a name of letters, digits and hyphens, got %q"
	switch {
	case m.Name == "":
		d.fail(errors.New("is missing"), "metadata.name")
	case d.key.Kind == object.KindService && !object.IsLabel(m.Name):
		d.fail(fmt.Errorf(want, m.Name), "metadata.name")
	}
	if !object.IsLabel(d.key.Namespace) {
		d.fail(fmt.Errorf(want, m.Namespace), "metadata.namespace")
	}
}

// Mismatch returns the object.Error for an error of package json about a field; path is "" for a whole object.
func Mismatch(err error, path string) object.Error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return object.Error{Field: path, Msg: err.Error()}
	}
	want := map[reflect.Kind]string{
		reflect.String: "a string", reflect.Bool: "a boolean", reflect.Slice: "a list", reflect.Struct: "an object", reflect.Map: "an object",
		reflect.Uint16: "a port number, 1 to 65535",
	}
	got, known := map[string]string{"array": "a list", "object": "an object", "string": "a string", "bool": "a boolean", "number": "a number"}[wrong.Value]
	if !known {
		got = "the " + wrong.Value // "number 1.5"
	}
	return object.Error{Field: Join(path, wrong.Field), Msg: fmt.Sprintf("want %s, got %s", want[wrong.Type.Kind()], got)}
}

// Join returns the path of a field of an object that is at a path itself. One of them may be "".
func Join(path, field string) string { return strings.Trim(path+"."+field, ".") }
