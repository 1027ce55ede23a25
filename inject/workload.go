package inject

import (
	"cmp"
	"slices"
	"strings"
)

// A workload is an object with a pod in it.
type workload struct {
	kind   string
	object map[string]any
	pod    map[string]any // the object itself, or its template; nil if the kind is not known
}

// templates are the places of the pods in objects, by version and kind.
var templates = map[string][]string{ //nolint:gochecknoglobals // a constant
	"v1 Pod":                   {},
	"v1 PodTemplate":           {"template"},
	"v1 ReplicationController": {"spec", "template"},
	"apps/v1 Deployment":       {"spec", "template"},
	"apps/v1 StatefulSet":      {"spec", "template"},
	"apps/v1 DaemonSet":        {"spec", "template"},
	"apps/v1 ReplicaSet":       {"spec", "template"},
	"batch/v1 Job":             {"spec", "template"},
	"batch/v1 CronJob":         {"spec", "jobTemplate", "spec", "template"},
}

// workloads returns the workload in an object; for a List, the workloads of its items.
func workloads(root map[string]any) []workload {
	var all []workload
	for _, o := range objects(root, text(root, "apiVersion"), text(root, "kind")) {
		place, known := templates[o.version+" "+o.kind]
		pod := o.fields
		for _, key := range place {
			pod = object(pod, key)
		}
		switch {
		case known && pod != nil:
			all = append(all, workload{o.kind, o.fields, pod})
		case !known && hasPod(o.fields):
			all = append(all, workload{o.kind, o.fields, nil})
		}
	}
	return all
}

// hasPod reports whether a value, or a value in it, has the form of a pod: a spec with containers.
func hasPod(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		if list(object(v, "spec"), "containers") != nil {
			return true
		}
		for _, child := range v {
			if hasPod(child) {
				return true
			}
		}
	case []any:
		return slices.ContainsFunc(v, hasPod)
	}
	return false
}

// An anObject is a Kubernetes object in a document.
type anObject struct {
	fields        map[string]any
	version, kind string
}

// objects returns the objects of a List and of the Lists in it, as kubectl reads them. For an object that is no List, it
// returns that object. The items of a list of one kind, such as a DeploymentList, may have no kind of their own.
func objects(fields map[string]any, version, kind string) []anObject {
	single, isList := strings.CutSuffix(kind, "List")
	if _, ok := templates[version+" "+single]; !isList || !ok && version != "v1" {
		return []anObject{{fields, version, kind}}
	}
	var all []anObject
	for _, item := range list(fields, "items") {
		itemFields, _ := item.(map[string]any)
		itemVersion, itemKind := text(itemFields, "apiVersion"), text(itemFields, "kind")
		if itemKind == "" {
			itemVersion, itemKind = version, single
		}
		all = append(all, objects(itemFields, itemVersion, itemKind)...)
	}
	return all
}

// namespace returns the namespace of the object, or other if the object names none.
func (w workload) namespace(other string) string {
	return cmp.Or(text(object(w.object, "metadata"), "namespace"), other)
}

// name returns the name of the object in messages. other is the namespace of objects that name none.
func (w workload) name(other string) string {
	meta := object(w.object, "metadata")
	return w.kind + " " + w.namespace(other) + "/" + cmp.Or(text(meta, "name"), text(meta, "generateName"), "(no name)")
}

// nameOf returns the field `name` of an element of a list; "" if it has none.
func nameOf(v any) string {
	m, _ := v.(map[string]any)
	return text(m, "name")
}

// text returns the text of a key, "" if it has none.
func text(m map[string]any, key string) string {
	s, _ := m[key].(string)
	return s
}

// list returns the list of a key, nil if it has none.
func list(m map[string]any, key string) []any {
	l, _ := m[key].([]any)
	return l
}

// object returns the object of a key, nil if it has none.
func object(m map[string]any, key string) map[string]any {
	o, _ := m[key].(map[string]any)
	return o
}
