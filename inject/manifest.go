package inject

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"
)

// A Report is the result for one pod of a manifest.
type Report struct {
	Object  string // such as "Deployment shop/cart"
	Line    int    // the line of the object in the manifest
	Outcome Outcome
	Reasons []string
}

// Manifest injects the pods of a manifest: YAML documents or JSON, with pods, workloads, Lists and other objects. A
// document in which no pod changes stays byte for byte. Other documents are written in the form that kubectl has, with
// their comments. namespace is the namespace of objects that name none. Pods need no
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
		m.readNamespaces(d.object)
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
	var failures []error
	changed := false
	for _, w := range workloads(d.object) {
		name, line := w.name(m.namespace), d.line
		if w.pod == nil {
			m.reports = append(m.reports, Report{name, line, Skipped, []string{ReasonUnknownKind}})
			continue
		}
		namespace := m.namespaces[w.namespace(m.namespace)]
		namespace.Name, namespace.Requested = w.namespace(m.namespace), true
		result, err := Pod(w.pod, namespace, m.cfg)
		if err != nil {
			failures = append(failures, fmt.Errorf("line %d: %s: %w", line, name, err))
			continue
		}
		m.reports = append(m.reports, Report{name, line, result.Outcome, result.Reasons})
		changed = changed || !reflect.DeepEqual(w.pod, result.Pod)
		maps.Copy(w.pod, result.Pod)
	}
	if len(failures) > 0 || !changed {
		return d.Body, errors.Join(failures...)
	}
	return d.render(), nil
}

// readNamespaces notes the Namespaces in a document.
func (m *manifest) readNamespaces(root map[string]any) {
	for _, o := range objects(root, text(root, "apiVersion"), text(root, "kind")) {
		if meta := object(o.fields, "metadata"); meta != nil && o.kind == "Namespace" && o.version == "v1" {
			m.namespaces[text(meta, "name")] = Namespace{Labels: texts(object(meta, "labels")), Annotations: texts(object(meta, "annotations"))}
		}
	}
}

// texts returns the keys of an object that have texts.
func texts(m map[string]any) map[string]string {
	all := map[string]string{}
	for key := range m {
		all[key] = text(m, key)
	}
	return all
}
