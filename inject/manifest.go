package inject

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"

	"k8s.io/apimachinery/pkg/runtime"
)

// A Report is the result for one pod of a manifest.
type Report struct {
	Object  string // such as "Deployment shop/cart"
	Line    int    // the line of the object in the manifest
	Outcome Outcome
	Reasons []string
}

// Manifest injects the pods of a manifest: YAML documents or JSON, with pods, workloads, Lists and other objects. A document
// in which no pod changes stays byte for byte. Other documents are written in the form that kubectl has, without comments.
// namespace is the namespace of objects that name none. Pods need no label. If the manifest has the Namespace of a pod,
// Manifest uses the annotations of the Namespace. If that Namespace has the label [Label], but not with the value [Enabled],
// only pods that have the label themselves are injected.
//
// Errors name the lines of malformed text and objects, and the text is of no use then. Refused pods are in the reports.
func Manifest(text []byte, namespace string, cfg Config) ([]byte, []Report, error) {
	if _, err := cfg.withDefaults(); err != nil {
		return nil, nil, err
	}
	m := manifest{namespace: namespace, namespaces: map[string]Namespace{}, policies: map[string]bool{}, cfg: cfg}
	documents, err := split(text)
	if err != nil {
		return nil, nil, err
	}
	for _, d := range documents {
		m.read(d.object)
	}
	var out bytes.Buffer
	var failures []error
	for _, d := range documents {
		body, err := m.inject(d)
		if err != nil {
			failures = append(failures, err)
		}
		if d.json && len(m.added) > 0 && len(d.Marker) == 0 { // otherwise kubectl would read all that follows as JSON
			d.Marker = []byte("---\n")
		}
		out.Write(d.Marker)
		out.Write(body)
	}
	for _, object := range m.added { // at the end, because the manifest may have their Namespaces; their pods wait for them
		if !bytes.HasSuffix(out.Bytes(), []byte("\n")) {
			out.WriteByte('\n')
		}
		out.WriteString("---\n" + string(writeObject(object, false)))
	}
	return out.Bytes(), m.reports, errors.Join(failures...)
}

// A manifest is the state of one call of [Manifest].
type manifest struct {
	namespace  string
	namespaces map[string]Namespace // the Namespaces in the manifest, by name
	policies   map[string]bool      // the namespaces that have the ConfigMap with the policy; "" if an object names none
	cfg        Config
	added      []map[string]any // at the end of the manifest
	reports    []Report
}

// inject returns the body of a document with nametap in its pods.
func (m *manifest) inject(d *document) ([]byte, error) {
	var failures []error
	changed := false
	for _, w := range workloads(d.object) {
		name, line := w.name(m.namespace), d.line
		if w.pod == nil {
			report := Report{name, line, Skipped, []string{ReasonUnknownKind}}
			if m.cfg.Policy != nil { // its pods would have no guard
				report.Outcome = Refused
			}
			m.reports = append(m.reports, report)
			continue
		}
		namespace := m.namespaces[w.namespace(m.namespace)]
		namespace.Name, namespace.Requested = w.namespace(m.namespace), true
		pod := w.pod
		if m.cfg.Policy != nil {
			pod = runtime.DeepCopyJSON(pod)
			ensure(ensure(pod, "metadata"), "annotations")[guardAnnotation] = configMapName(m.cfg.Policy)
		}
		result, err := Pod(pod, namespace, m.cfg)
		if err != nil {
			failures = append(failures, fmt.Errorf("line %d: %s: %w", line, name, err))
			continue
		}
		m.reports = append(m.reports, Report{name, line, result.Outcome, result.Reasons})
		if result.Outcome != Injected {
			continue
		}
		changed = changed || !reflect.DeepEqual(w.pod, result.Pod)
		maps.Copy(w.pod, result.Pod)
		if own := w.namespace(""); m.cfg.Policy != nil && !m.policies[own] {
			m.policies[own] = true
			m.added = append(m.added, configMap(m.cfg.Policy, own))
		}
	}
	if len(failures) > 0 || !changed {
		return d.Body, errors.Join(failures...)
	}
	return d.render(), nil
}

// read notes the Namespaces in a document, and in which of them it has the ConfigMap with the policy.
func (m *manifest) read(root map[string]any) {
	for _, o := range objects(root, text(root, "apiVersion"), text(root, "kind")) {
		meta := object(o.fields, "metadata")
		switch {
		case meta == nil || o.version != "v1":
		case o.kind == "Namespace":
			m.namespaces[text(meta, "name")] = Namespace{Labels: texts(object(meta, "labels")), Annotations: texts(object(meta, "annotations"))}
		case o.kind == "ConfigMap" && text(meta, "name") == configMapName(m.cfg.Policy):
			m.policies[text(meta, "namespace")] = true
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
