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
	var changing []workload
	for _, w := range workloads(root.Content[0]) {
		if w.pod == nil {
			m.reports = append(m.reports, Report{w.name(m.namespace), w.object.Line, Skipped, []string{ReasonUnknownKind}})
			continue
		}
		result, err := m.pod(w)
		if err != nil {
			failures = append(failures, fmt.Errorf("line %d: %s: %w", w.object.Line, w.name(m.namespace), err))
			continue
		}
		m.reports = append(m.reports, Report{w.name(m.namespace), w.object.Line, result.Outcome, result.Reasons})
		if result.Outcome == Injected && !sameTree(w.pod, result.Pod, true) {
			changing = append(changing, w)
		}
	}
	if len(failures) > 0 || len(changing) == 0 {
		return d.Body, errors.Join(failures...)
	}
	detach(root, changing)
	for _, w := range changing {
		result, err := m.pod(w)
		if err != nil {
			return d.Body, err
		}
		*w.pod = *result.Pod
	}
	return d.render(root)
}

// pod injects the pod of a workload. It does not change the workload.
func (m *manifest) pod(w workload) (Result, error) {
	namespace := m.namespaces[w.namespace(m.namespace)]
	namespace.Name, namespace.Requested = w.namespace(m.namespace), true
	return Pod(w.pod, namespace, m.cfg)
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
