package kube

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/nametap/nametap/discovery/object"
)

// A slim is an object with only the fields that the tables need. It takes the place of the whole object in
// client-go until it is in the feed.
type slim struct {
	object object.Object
	errs   []object.Error // the errors in the whole object; object lacks the parts with errors
}

func newSlim(kind string, o metav1.Object) *slim {
	namespace, name := strings.Clone(o.GetNamespace()), strings.Clone(o.GetName())
	return &slim{object: object.Object{Key: object.Key{Kind: kind, Namespace: namespace, Name: name}}}
}

// GetObjectMeta returns the part of the metadata by which client-go tells objects apart.
func (s *slim) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: s.object.Key.Namespace, Name: s.object.Key.Name}
}

// fail records an error in a field, once.
func (s *slim) fail(field, format string, args ...any) {
	s.errs = object.AppendError(s.errs, object.Error{File: s.object.Key.String(), Field: field, Msg: fmt.Sprintf(format, args...), Object: s.object.Key})
}
