package discovery

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// parsed is what one file holds.
type parsed struct {
	objects []object
	errs    []DocumentError
	// broken are the keys of objects that are named but not usable.
	broken map[key]bool
	// unnamed is set if a document is so broken that it may have held anything.
	unnamed bool
	// notes say of objects that are fine why they make no host.
	notes []string
}

// parseFile reads the documents of one file. It never fails as a whole: a
// document that is broken is an error of its own and the others count.
func parseFile(name string, data []byte) parsed {
	p := parsed{broken: map[key]bool{}}
	for _, chunk := range splitDocuments(data) {
		p.parseDocument(name, chunk)
	}
	return p
}

// chunk is the text of one document, a part of its file's, and the number of
// lines before it.
type chunk struct {
	text   []byte
	offset int
}

// splitDocuments cuts a file at its document markers. YAML allows no other
// meaning for "---" and "..." at the start of a line (1.2.2, 9.1.4), so a
// syntax error in one document cannot hide the next.
func splitDocuments(data []byte) []*chunk {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))
	var out []*chunk
	cur, start, end := &chunk{}, 0, 0
	for line := 0; end < len(data); line++ {
		n := bytes.IndexByte(data[end:], '\n') + 1
		if n == 0 {
			n = len(data) - end
		}
		text := data[end : end+n]
		opens, closes := isMarker(text, "---"), isMarker(text, "...")
		if opens || closes {
			cur.text = data[start:end:end]
			out = append(out, cur)
			cur, start = &chunk{offset: line}, end
			if closes {
				cur.offset, start = line+1, end+n
			}
		}
		end += n
	}
	cur.text = data[start:]
	return append(out, cur)
}

func isMarker(line []byte, marker string) bool {
	rest, ok := bytes.CutPrefix(line, []byte(marker))
	return ok && (len(rest) == 0 || bytes.IndexByte([]byte(" \t\r\n"), rest[0]) >= 0)
}

// isBlank reports whether there is nothing but comments and directives.
func isBlank(text []byte) bool {
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && line[0] != '%' && string(line) != "---" {
			return false
		}
	}
	return true
}

func (p *parsed) parseDocument(name string, c *chunk) {
	if isBlank(c.text) {
		return
	}
	doc := &document{file: name, text: c, lines: bytes.Count(c.text, []byte("\n")) + 1}
	var node yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(c.text))
	err := dec.Decode(&node)
	if errors.Is(err, io.EOF) {
		return
	}
	if err == nil {
		// What follows the first value without a marker is an error, too.
		if err = dec.Decode(new(yaml.Node)); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err != nil {
		line, msg := yamlError(err)
		doc.fail(line, "", "not valid YAML: %s", msg)
		p.errs = append(p.errs, doc.errs...)
		p.unnamed = true
		return
	}
	if node.Kind != yaml.DocumentNode || len(node.Content) == 0 {
		return
	}
	root := newField(doc, node.Content[0], "")
	if !root.present() {
		return
	}
	p.parseObject(root, "")
}

// yamlError takes the line out of the library's message, where it is relative
// to the document. The library counts from 0 where its parser gives up, and
// from 1 where its scanner does; only the words tell the two apart.
func yamlError(err error) (line int, msg string) {
	msg = strings.TrimPrefix(err.Error(), "yaml: ")
	if m := regexp.MustCompile(`^line (\d+): `).FindStringSubmatch(msg); m != nil {
		line, _ = strconv.Atoi(m[1])
		msg = msg[len(m[0]):]
	}
	if regexp.MustCompile(`^did not find expected (key|node|<document|')`).MatchString(msg) {
		line++
	}
	return max(line, 1), msg
}

// parseObject reads an object or a list of objects. Within a list of one kind
// (ServiceList) the elements may leave their kind out: listKind is it.
func (p *parsed) parseObject(root field, listKind string) {
	doc := &document{file: root.doc.file, text: root.doc.text, lines: root.doc.lines}
	root.doc = doc
	apiVersion, kind := root.get("apiVersion").str(), root.get("kind").str()
	if kind == "" && len(doc.errs) == 0 && listKind != "" {
		kind = listKind
	}
	if kind == "" {
		if len(doc.errs) == 0 {
			doc.fail(root.line(), joinPath(root.path, "kind"), "is missing: want %s, %s, %s, %s or List",
				kindService, kindEndpointSlice, kindPod, kindServiceEntry)
		}
		p.errs = append(p.errs, doc.errs...)
		p.unnamed = true
		return
	}
	if itemKind, ok := strings.CutSuffix(kind, "List"); ok && root.get("items").present() {
		p.parseList(root, itemKind)
		return
	}
	if !known(apiVersion, kind, listKind != "") {
		p.notes = append(p.notes, strings.TrimSpace(apiVersion+" "+kind)+" is of no use here and is skipped")
		return
	}
	o := object{file: doc.file, line: doc.text.offset + root.line(), text: doc.text}
	o.key = root.key(kind)
	decodeKind(root, &o)
	switch {
	case len(doc.errs) == 0:
		p.objects = append(p.objects, o)
		if o.service != nil && o.service.unallocated() {
			p.notes = append(p.notes, o.key.String()+" has no spec.clusterIP: in a directory nobody allocates one, write it")
		}
	case o.key.name == "":
		p.unnamed = true
	default:
		p.broken[o.key] = true
	}
	for _, e := range doc.errs {
		e.object = o.key
		p.errs = append(p.errs, e)
	}
}

func (p *parsed) parseList(root field, itemKind string) {
	for _, item := range root.get("items").list() {
		// A list within a list is refused: with aliases it can grow without end.
		if strings.HasSuffix(item.peekKind(), "List") {
			item.fail("a List within a List is not read")
			continue
		}
		p.parseObject(item, itemKind)
	}
	if len(root.doc.errs) > 0 {
		p.unnamed = true
		p.errs = append(p.errs, root.doc.errs...)
	}
}

// peekKind reads the kind without recording an error.
func (f field) peekKind() string {
	f.doc = &document{text: &chunk{}}
	return f.get("kind").str()
}

// key reads the object's identity; name is empty if it has none.
func (f field) key(kind string) key {
	meta := f.get("metadata")
	if !meta.present() {
		f.doc.fail(f.line(), joinPath(f.path, "metadata"), "is missing")
		return key{}
	}
	nameField := meta.get("name")
	k := key{kind: kind, namespace: meta.get("namespace").str(), name: nameField.str()}
	if k.namespace == "" {
		k.namespace = "default"
	}
	switch {
	case k.name == "" && !nameField.present():
		f.doc.fail(meta.line(), nameField.path, "is missing")
	case k.name != "" && kind == kindService && !isLabel(k.name):
		nameField.fail("want a name of letters, digits and hyphens, got %q", k.name)
	}
	if !isLabel(k.namespace) {
		meta.get("namespace").fail("want a name of letters, digits and hyphens, got %q", k.namespace)
	}
	return k
}

func joinPath(parent, name string) string {
	if parent == "" {
		return name
	}
	return fmt.Sprintf("%s.%s", parent, name)
}

// known reports whether objects of the kind make hosts. The group counts too:
// Knative's Service is another thing. Elements of a list may leave it out.
func known(apiVersion, kind string, inList bool) bool {
	group, _, hasGroup := strings.Cut(apiVersion, "/")
	if !hasGroup {
		group = ""
	}
	if apiVersion == "" && inList {
		return kind == kindService || kind == kindPod || kind == kindEndpointSlice || kind == kindServiceEntry
	}
	switch kind {
	case kindService, kindPod:
		return group == ""
	case kindEndpointSlice:
		return group == "discovery.k8s.io"
	case kindServiceEntry:
		return group == "networking.istio.io"
	}
	return false
}
