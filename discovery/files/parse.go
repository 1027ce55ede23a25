package files

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/yamltext"
)

// located is an object with its place: the file, the line and the document.
type located struct {
	object.Object
	file string
	line int
	text *yamltext.Document // the document that holds it
	// partial is true for a Sidecar with errors, without the wrong parts. It is used while it has no good form:
	// without it, workloads would see more hosts.
	partial bool
}

// parsed is the result of parsing a file.
type parsed struct {
	objects []located
	errs    []object.Error
	// broken holds the keys of the objects that have errors.
	broken map[object.Key]bool
	// unnamed is true if a document is so broken that the names of its objects are not known.
	unnamed bool
	// notes say why objects without errors make no host.
	notes []string
}

// Parse returns the objects in the documents of a file, and the errors in the documents.
func Parse(name string, data []byte) ([]object.Object, []object.Error) {
	p := parseFile(name, data)
	objects := make([]object.Object, 0, len(p.objects))
	for _, o := range p.objects {
		objects = append(objects, o.Object)
	}
	return objects, p.errs
}

// byteOrderMark may be at the start of a file (YAML 1.2.2, 5.2).
const byteOrderMark = "\xef\xbb\xbf"

// parseFile parses the documents of a file. An error in one document does not affect the
// others.
func parseFile(name string, data []byte) *parsed {
	p := &parsed{broken: map[object.Key]bool{}}
	for _, text := range yamltext.Split(bytes.TrimPrefix(data, []byte(byteOrderMark))) {
		p.parseDocument(name, text)
	}
	return p
}

func (p *parsed) parseDocument(name string, text *yamltext.Document) {
	if yamltext.Blank(text.Body) {
		return
	}
	doc := &document{file: name, text: text, lines: bytes.Count(text.Body, []byte("\n")) + 1}
	var node yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(text.Body))
	err := dec.Decode(&node)
	if errors.Is(err, io.EOF) {
		return
	}
	if err == nil {
		// Decode returns an error if there is a second value without a marker before it.
		if err = dec.Decode(new(yaml.Node)); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err != nil {
		line, msg := yamltext.Cause(err)
		doc.fail(max(line, 1), "", "not valid YAML: %s", msg)
		p.errs = append(p.errs, doc.errs...)
		p.unnamed = true
		return
	}
	if node.Kind != yaml.DocumentNode || len(node.Content) == 0 {
		return
	}
	root := doc.field(node.Content[0])
	if !root.Present() {
		return
	}
	p.parseObject(doc, root, "")
}

// parseObject parses an object or a list of objects. The parameter listKind is the kind of objects that have no field
// kind, because they are in a list such as a ServiceList. It is "" outside such lists.
func (p *parsed) parseObject(parent *document, root decode.Field, listKind string) {
	doc := &document{file: parent.file, text: parent.text, lines: parent.lines}
	root = root.WithReport(doc.report)
	apiVersion, kind := root.Member("apiVersion").Text(), root.Member("kind").Text()
	if kind == "" && len(doc.errs) == 0 && listKind != "" {
		kind = listKind
	}
	if kind == "" {
		if len(doc.errs) == 0 {
			root.Missing("kind", fmt.Sprintf(": want %s, %s, %s, %s, %s, %s or List",
				object.KindService, object.KindEndpointSlice, object.KindPod, object.KindServiceEntry, object.KindSidecar, object.KindServiceImport))
		}
		p.errs = append(p.errs, doc.errs...)
		p.unnamed = true
		return
	}
	if itemKind, ok := strings.CutSuffix(kind, "List"); ok && root.Member("items").Present() {
		p.parseList(doc, root, itemKind)
		return
	}
	if !known(apiVersion, kind, listKind != "") {
		p.notes = append(p.notes, strings.TrimSpace(apiVersion+" "+kind)+" is not read by nametap-discovery")
		return
	}
	o := located{file: doc.file, line: doc.text.Before + lineOf(root), text: doc.text}
	o.Key = keyOf(root, kind)
	decode.Decode(root, &o.Object)
	switch {
	case len(doc.errs) == 0:
		p.objects = append(p.objects, o)
		if o.Service != nil && o.Service.Unallocated() {
			p.notes = append(p.notes, o.Key.String()+" has no spec.clusterIP, and no API server allocates one for a directory: add it to the file")
		}
	case o.Key.Name == "":
		p.unnamed = true
	default:
		p.broken[o.Key] = true
		if o.partial = o.Sidecar != nil; o.partial {
			p.objects = append(p.objects, o)
		}
	}
	for _, e := range doc.errs {
		e.Object = o.Key
		p.errs = append(p.errs, e)
	}
}

func (p *parsed) parseList(doc *document, root decode.Field, itemKind string) {
	for _, item := range root.Member("items").Elements() {
		// With aliases, lists in lists could grow exponentially.
		if strings.HasSuffix(peekKind(item), "List") {
			item.Fail("a List in a List is not supported")
			continue
		}
		p.parseObject(doc, item, itemKind)
	}
	if len(doc.errs) > 0 {
		p.unnamed = true
		p.errs = append(p.errs, doc.errs...)
	}
}

// peekKind returns the kind of an object, without recording errors.
func peekKind(f decode.Field) string {
	return f.WithReport(func(decode.Field, string) {}).Member("kind").Text()
}

// keyOf returns the key of an object. The name in the key is empty if the object has none.
func keyOf(f decode.Field, kind string) object.Key {
	meta := f.Member("metadata")
	if !meta.Present() {
		f.Missing("metadata", "")
		return object.Key{}
	}
	nameField := meta.Member("name")
	k := object.Key{Kind: kind, Namespace: meta.Member("namespace").Text(), Name: nameField.Text()}
	if k.Namespace == "" {
		k.Namespace = "default"
	}
	switch {
	case k.Name == "" && !nameField.Present():
		meta.Missing("name", "")
	case k.Name != "" && kind == object.KindService && !object.IsLabel(k.Name):
		nameField.Fail("want a name of letters, digits and hyphens, got %q", k.Name)
	}
	if !object.IsLabel(k.Namespace) {
		meta.Member("namespace").Fail("want a name of letters, digits and hyphens, got %q", k.Namespace)
	}
	return k
}

// known reports whether objects with this apiVersion and kind are read. The API group matters, because Knative, too, has
// a kind Service. Elements of a list may have no apiVersion.
func known(apiVersion, kind string, inList bool) bool {
	group, _, hasGroup := strings.Cut(apiVersion, "/")
	if !hasGroup {
		group = ""
	}
	want, read := groupOf(kind)
	return read && (group == want || apiVersion == "" && inList)
}

// groupOf returns the API group of a kind of objects that are read.
func groupOf(kind string) (group string, read bool) {
	switch kind {
	case object.KindService, object.KindPod:
		return "", true
	case object.KindEndpointSlice:
		return "discovery.k8s.io", true
	case object.KindServiceEntry, object.KindSidecar:
		return "networking.istio.io", true
	case object.KindServiceImport:
		return "multicluster.x-k8s.io", true
	}
	return "", false
}
