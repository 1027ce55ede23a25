package inject

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A workload is an object with a pod in it.
type workload struct {
	kind   string
	object *yaml.Node
	pod    *yaml.Node   // the object itself, or its template; nil if the kind is not known
	path   []*yaml.Node // the nodes from the root of the document to the pod
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
func workloads(root *yaml.Node) []workload {
	var all []workload
	for _, o := range objects(root, text(root, "apiVersion"), text(root, "kind"), nil) {
		place, ok := templates[o.version+" "+o.kind]
		pod, path := o.node, append(o.path, o.node)
		for _, key := range place {
			if pod = value(pod, key); pod == nil || pod.Kind != yaml.MappingNode {
				ok = false
				break
			}
			path = append(path, pod)
		}
		switch {
		case ok:
			all = append(all, workload{o.kind, o.node, pod, path})
		case place == nil && hasTemplate(o.node):
			all = append(all, workload{o.kind, o.node, nil, nil})
		}
	}
	return all
}

// hasTemplate reports whether an object, or an object in it, has the form of a pod: a spec with containers.
func hasTemplate(object *yaml.Node) (found bool) {
	visit(object, func(n *yaml.Node) {
		if spec := lookup(n, "spec"); !found && spec != nil {
			containers := lookup(spec, "containers")
			found = containers != nil && containers.Kind == yaml.SequenceNode
		}
	})
	return found
}

// An object is a Kubernetes object in a document.
type object struct {
	node          *yaml.Node
	version, kind string
	path          []*yaml.Node // the nodes from the root of the document to the list that has the object
}

// objects returns the objects of a List and of the Lists in it, as kubectl reads them. For an object that is no List, it
// returns that object. The items of a list of one kind, such as a DeploymentList, may have no kind of their own.
func objects(node *yaml.Node, version, kind string, path []*yaml.Node) []object {
	single, isList := strings.CutSuffix(kind, "List")
	if _, ok := templates[version+" "+single]; !isList || !ok && version != "v1" {
		return []object{{node, version, kind, path}}
	}
	var all []object
	items := value(node, "items")
	for _, item := range elements(items) {
		itemVersion, itemKind := text(item, "apiVersion"), text(item, "kind")
		if itemKind == "" {
			itemVersion, itemKind = version, single
		}
		all = append(all, objects(item, itemVersion, itemKind, slices.Concat(path, []*yaml.Node{node, items}))...)
	}
	return all
}

// namespace returns the namespace of the object, or other if the object names none.
func (w workload) namespace(other string) string {
	if meta := lookup(w.object, "metadata"); meta != nil {
		if name := text(meta, "namespace"); name != "" {
			return name
		}
	}
	return other
}

// name returns the name of the object in messages. other is the namespace of objects that name none.
func (w workload) name(other string) string {
	name := "(no name)"
	if meta := lookup(w.object, "metadata"); meta != nil {
		for _, key := range []string{"generateName", "name"} {
			if s := text(meta, key); s != "" {
				name = s
			}
		}
	}
	return w.kind + " " + w.namespace(other) + "/" + name
}

// detach replaces aliases in a document by copies, if they name parts that injection changes in the workloads: the values
// of the aliases must stay.
func detach(root *yaml.Node, workloads []workload) {
	changing := map[*yaml.Node]bool{}
	for _, w := range workloads {
		for _, n := range slices.Concat(w.path, changed(w.pod)) {
			changing[n] = true
		}
	}
	visit(root, func(n *yaml.Node) {
		for i, child := range n.Content {
			if child.Kind == yaml.AliasNode && changing[child.Alias] {
				n.Content[i] = expanded(child)
			}
		}
	})
}

// changed returns the parts of a pod that injection changes, or removes.
func changed(pod *yaml.Node) []*yaml.Node {
	var parts []*yaml.Node
	add := func(n *yaml.Node) { parts = append(parts, n) }
	within := func(m *yaml.Node, keys ...string) {
		for _, key := range keys {
			if v := value(m, key); v != nil {
				visit(v, add)
			}
		}
	}
	if meta := value(pod, "metadata"); meta != nil {
		add(meta)
		within(meta, "annotations")
	}
	spec := value(pod, "spec")
	if spec == nil {
		return parts
	}
	add(spec)
	for _, key := range []string{"initContainers", "containers", "volumes", "imagePullSecrets"} {
		if list := value(spec, key); list != nil {
			add(list)
		}
	}
	for _, c := range istioElements(spec) {
		visit(c, add)
	}
	within(spec, "dnsPolicy", "dnsConfig", "securityContext")
	return parts
}
