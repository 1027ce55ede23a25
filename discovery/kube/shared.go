package kube

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// The resources of objects that replicas share.
const (
	secrets    = "secrets"
	configMaps = "configmaps"
)

// A namespaced object has a namespace.
type namespaced interface {
	runtime.Object
	metav1.Object
}

// create creates an object.
func (c *clients) create(ctx context.Context, resource string, o namespaced) error {
	return c.core.Post().Resource(resource).Namespace(o.GetNamespace()).Body(o).Do(ctx).Error()
}

// update changes an object, unless it has changed since it was read.
func (c *clients) update(ctx context.Context, resource string, o namespaced) error {
	return c.core.Put().Resource(resource).Namespace(o.GetNamespace()).Name(o.GetName()).Body(o).Do(ctx).Error()
}

// patch applies text, a merge patch in JSON (RFC 7396), to an object.
func (c *clients) patch(ctx context.Context, resource string, o cache.ObjectName, text []byte) error {
	return c.core.Patch(types.MergePatchType).Resource(resource).Namespace(o.Namespace).Name(o.Name).Body(text).Do(ctx).Error()
}

// labels returns the labels of the objects that nametap-discovery makes.
func labels() map[string]string {
	return map[string]string{"app.kubernetes.io/managed-by": "nametap-discovery"}
}

// fieldManager is the name under which this program writes the field caBundle. With each write, the API server records
// this name as an owner of the field. A second patch removes the record. If the record stayed, server-side apply of a
// manifest (Helm 4) could not remove a webhook from the configuration, and would have a conflict if the manifest sets
// the field.
const fieldManager = "nametap-discovery"

// writersOf returns the programs, other than this one, that own a field of an object.
func writersOf(entries []metav1.ManagedFieldsEntry, field string) (writers []string) {
	for _, entry := range entries {
		if entry.Manager != fieldManager && entry.FieldsV1 != nil && bytes.Contains(entry.FieldsV1.GetRawBytes(), []byte(`"f:`+field+`"`)) {
			writers = append(writers, fmt.Sprintf("%s (%s)", entry.Manager, entry.Operation))
		}
	}
	return writers
}

// adviceForRole returns advice if err says that the API server has refused a request.
func adviceForRole(err error) string {
	return ifRefused(err, ": give nametap-discovery the Role of docs/discovery.md")
}

// ignore returns err, or nil if err is of one of the kinds.
func ignore(err error, kinds ...func(error) bool) error {
	if err != nil && slices.ContainsFunc(kinds, func(is func(error) bool) bool { return is(err) }) {
		return nil
	}
	return err
}
