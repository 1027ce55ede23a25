package inject

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// A Report says what has become of one pod of a manifest.
type Report struct {
	Object  string // as "Deployment shop/cart"
	Line    int    // of the manifest
	Outcome Outcome
	Reasons []string
}

// Manifest injects the pods of a manifest: YAML documents or JSON, with pods, workloads, Lists and
// other objects. Documents without a pod that changes stay byte for byte; the others keep their comments
// and, if merge succeeds, all lines that do not change. namespace is the one of objects that name none.
// Injection counts as requested, so pods need no label, unless the manifest has their Namespace with another
// value of the label than Enabled. Annotations of that Namespace count, too.
//
// The errors name their lines, and are about malformed text and objects. Refused pods are in the
// reports. If there are errors, the caller should use none of the text.
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
		out.Write(d.marker)
		out.Write(body)
	}
	return out.Bytes(), m.reports, errors.Join(failures...)
}

// A manifest is the state of Manifest.
type manifest struct {
	namespace  string
	namespaces map[string]Namespace // that are in the manifest
	cfg        Config
	reports    []Report
}

// A document is a document of a manifest.
type document struct {
	marker []byte // the line that begins it, if any
	body   []byte
	line   int        // the number of lines before the body
	root   *yaml.Node // nil without an object
}

// split returns the documents of a text. A document without an object has no root. A line that
// begins with `---` or `...` separates documents wherever it is, also in a quoted text (YAML 1.2,
// 9.1.2).
func split(text []byte) ([]*document, error) {
	var documents []*document
	current, number := &document{}, 0
	flush := func(next *document) {
		if len(current.marker)+len(current.body) > 0 {
			documents = append(documents, current)
		}
		current = next
	}
	for line := range bytes.Lines(text) {
		number++
		switch rest, begins := bytes.CutPrefix(line, []byte("---")); {
		case begins && separated(rest):
			flush(&document{marker: line, line: number})
			if content := bytes.TrimSpace(rest); len(content) > 0 && content[0] != '#' {
				current.marker, current.body, current.line = []byte("---"), rest, number-1
			}
		case bytes.HasPrefix(line, []byte("...")) && separated(line[3:]):
			current.body = append(current.body[:len(current.body):len(current.body)], line...)
			flush(&document{line: number})
		default:
			current.body = append(current.body, line...)
		}
	}
	flush(nil)
	var failures []error
	for _, d := range documents {
		failures = append(failures, d.parse())
	}
	return documents, errors.Join(failures...)
}

// separated reports whether a marker ends where the rest of its line begins.
func separated(rest []byte) bool {
	return len(rest) == 0 || bytes.ContainsRune([]byte(" \t\r\n"), rune(rest[0]))
}

// parse reads the body.
func (d *document) parse() error {
	if directives(d.body) {
		return nil
	}
	node, err := d.read(d.body)
	if err != nil {
		return d.at(err)
	}
	if node != nil && node.Content[0].Kind == yaml.MappingNode {
		d.root = node
		visit(node, func(n *yaml.Node) { n.Line += d.line })
	}
	return nil
}

// read returns the tree of a text in the language of the document: JSON, or YAML.
func (d *document) read(text []byte) (*yaml.Node, error) {
	if !json.Valid(d.body) {
		return parseOne(text)
	}
	if !utf8.Valid(text) {
		return nil, errors.New("want JSON in UTF-8")
	}
	node, err := readJSON(text, math.MaxInt, math.MaxInt)
	if err != nil {
		return nil, err
	}
	return &yaml.Node{Kind: yaml.DocumentNode, Content: []*yaml.Node{node}, Line: node.Line}, validate(node)
}

// directives reports whether a text has only directives and comments, which end with `---`.
func directives(text []byte) bool {
	found := false
	for line := range bytes.Lines(text) {
		switch line = bytes.TrimSpace(line); {
		case len(line) == 0 || line[0] == '#':
		case line[0] != '%':
			return false
		default:
			found = true
		}
	}
	return found
}

// errorLine matches the number of a line in an error of the parser.
var errorLine = regexp.MustCompile(`^yaml: line (\d+): `)

// at returns an error of the parser with the line in the manifest.
func (d *document) at(err error) error {
	match := errorLine.FindStringSubmatch(err.Error())
	if match == nil {
		return fmt.Errorf("line %d: document that begins here: %w", d.line+1, err)
	}
	line, _ := strconv.Atoi(match[1]) // it is a number
	return fmt.Errorf("line %d: %s", d.line+line, strings.TrimPrefix(err.Error(), match[0]))
}

// inject returns the body of a document with nametap in its pods.
func (m *manifest) inject(d *document) ([]byte, error) {
	if d.root == nil {
		return d.body, nil
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
		return d.body, errors.Join(failures...)
	}
	return d.render(root)
}

// injectWorkload injects one pod of a document, which may have aliases, and reports whether that has changed it.
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
	if result.Outcome != Injected || same(w.pod, result.Pod, true) {
		return false, nil
	}
	if aliased { // they get the pod without nametap
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

// texts returns the keys of a map with their values.
func texts(m *yaml.Node) map[string]string {
	all := map[string]string{}
	if m != nil && m.Kind == yaml.MappingNode {
		own(m)
		for i := 0; i+1 < len(m.Content); i += 2 {
			all[m.Content[i].Value] = text(m, m.Content[i].Value)
		}
	}
	return all
}
