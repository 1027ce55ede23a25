package inject

import (
	"bytes"
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"
)

// A Report is the result for one pod of a manifest.
type Report struct {
	Object  string // such as "Deployment shop/cart"
	Line    int    // the line of the object in the manifest
	Outcome Outcome
	Reasons []string
}

// Manifest injects the pods of a manifest: YAML documents or JSON, with pods, workloads, Lists and other objects. A
// document in which no pod changes stays byte for byte. Other documents keep their comments. If possible, all lines
// that injection need not change stay as they are. namespace is the namespace of objects that name none. Pods need no
// label: the call itself asks for injection. If the manifest has the Namespace of a pod, Manifest uses the annotations
// of the Namespace. If that Namespace has the label [Label], but not with the value [Enabled], only pods that have the
// label themselves are injected.
//
// Errors are about malformed text and objects, and name the lines. Refused pods are in the
// reports. If there are errors, the caller should not use the text.
func Manifest(text []byte, namespace string, cfg Config) ([]byte, []Report, error) {
	if _, err := cfg.withDefaults(); err != nil {
		return nil, nil, err
	}
	m := manifest{namespace: namespace, namespaces: map[string]Namespace{}, cfg: cfg}
	documents, err := split(text)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range documents {
		m.readNamespaces(d.root)
	}
	var out bytes.Buffer
	var failures []error
	for _, d := range documents {
		body, err := m.inject(d)
		if err != nil {
			failures = append(failures, err)
		}
		out.Write(d.Marker)
		out.Write(body)
	}
	return out.Bytes(), m.reports, errors.Join(failures...)
}

// A manifest is the state of one call of [Manifest].
type manifest struct {
	namespace  string
	namespaces map[string]Namespace // the Namespaces in the manifest, by name
	cfg        Config
	reports    []Report
}

// inject returns the body of a document with nametap in its pods.
func (m *manifest) inject(d *document) ([]byte, error) {
	if d.root == nil {
		return d.Body, nil
	}
	root := clone(d.root)
	var failures []error
	changed, aliased := false, false
	visit(root, func(n *yaml.Node) { aliased = aliased || n.Kind == yaml.AliasNode })
	for _, w := range workloads(root.Content[0]) {
		replaced, err := m.injectWorkload(root, w, aliased)
		if err != nil {
			failures = append(failures, fmt.Errorf("line %d: %s: %w", w.object.Line, w.name(m.namespace), err))
		}
		changed = changed || replaced
	}
	if len(failures) > 0 || !changed {
		return d.Body, errors.Join(failures...)
	}
	return d.render(root)
}

// injectWorkload injects one pod of a document, and reports whether the pod has changed. aliased is true if the document
// has aliases.
func (m *manifest) injectWorkload(root *yaml.Node, w workload, aliased bool) (bool, error) {
	if w.pod == nil {
		m.reports = append(m.reports, Report{w.name(m.namespace), w.object.Line, Skipped, []string{ReasonUnknownKind}})
		return false, nil
	}
	namespace := m.namespaces[w.namespace(m.namespace)]
	namespace.Name, namespace.Requested = w.namespace(m.namespace), true
	result, err := Pod(w.pod, namespace, m.cfg)
	if err != nil {
		return false, err
	}
	m.reports = append(m.reports, Report{w.name(m.namespace), w.object.Line, result.Outcome, result.Reasons})
	if result.Outcome != Injected || sameTree(w.pod, result.Pod, true) {
		return false, nil
	}
	if aliased {
		// An alias elsewhere in the document may name a part that injection changes. Its value must stay, so detach
		// replaces the alias by a copy of that part.
		detach(root, w.path)
		if result, err = Pod(w.pod, namespace, m.cfg); err != nil {
			return false, err
		}
	}
	*w.pod = *result.Pod
	return true, nil
}

// readNamespaces notes the Namespaces in a document.
func (m *manifest) readNamespaces(root *yaml.Node) {
	if root == nil {
		return
	}
	first := clone(root).Content[0]
	for _, o := range objects(first, text(first, "apiVersion"), text(first, "kind"), nil) {
		if meta := value(o.node, "metadata"); meta != nil && o.kind == "Namespace" && o.version == "v1" {
			m.namespaces[text(meta, "name")] = Namespace{Labels: texts(value(meta, "labels")), Annotations: texts(value(meta, "annotations"))}
		}
	}
}
