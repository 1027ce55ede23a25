package files

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/discovery/decode"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/yamltext"
)

// located is an object with its place: the file, and the number of the document in it.
type located struct {
	object.Object
	file     string
	document int
}

// parsed is the result of parsing a file.
type parsed struct {
	file    string
	objects []located
	errs    []object.Error
	notes   []string // why objects without errors make no host
}

// byteOrderMark may be at the start of a file (YAML 1.2.2, 5.2).
const byteOrderMark = "\xef\xbb\xbf"

// parseFile parses the documents of a file, and numbers them from 1. An error in one document does not affect the others.
func parseFile(name string, data []byte) *parsed {
	p := &parsed{file: name}
	number := 0
	for _, text := range yamltext.Split(bytes.TrimPrefix(data, []byte(byteOrderMark))) {
		if yamltext.Blank(text.Body) {
			continue
		}
		number++
		in := located{file: p.file, document: number}
		switch data, err := toJSON(text.Body); {
		case err != nil:
			p.fail(in, object.Error{Msg: err.Error()})
		case string(data) != "null":
			p.parseObject(in, data, "", "")
		}
	}
	return p
}

// toJSON returns the JSON of the value in a YAML document.
func toJSON(body []byte) ([]byte, error) {
	var node yaml.Node
	var value any
	dec := yaml.NewDecoder(bytes.NewReader(body))
	err := dec.Decode(&node)
	if err == nil {
		useTexts(&node)
		err = node.Decode(&value)
	}
	if err == nil {
		// A second value without a marker before it is an error. The library also finds markers where yamltext does not.
		if err = dec.Decode(new(yaml.Node)); err == nil {
			err = errors.New("holds several documents: want UTF-8, and lines that end in LF or CRLF")
		}
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, yamltext.OneLine(err)
	}
	data, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("want a value that JSON has, too: %w", err)
	}
	return data, nil
}

// useTexts makes texts of what JSON does not have, as kubectl does: times, and keys that are numbers.
func useTexts(node *yaml.Node) {
	for i, n := range node.Content {
		isKey := node.Kind == yaml.MappingNode && i%2 == 0
		if n.Tag == "!!timestamp" || isKey && n.Kind == yaml.ScalarNode && n.Tag != "!!merge" {
			n.Tag = "!!str"
		}
		useTexts(n)
	}
}

// fail adds an error in a document.
func (p *parsed) fail(in located, e object.Error) {
	e.File, e.Document = in.file, in.document
	p.errs = append(p.errs, e)
}

// parseObject parses the JSON of an object or of a list of objects. The parameter path is that of the object in the
// document, and listKind the kind of objects that have no field kind, because they are in a list such as a ServiceList;
// both are "" outside of lists.
func (p *parsed) parseObject(in located, data []byte, path, listKind string) {
	var head struct {
		APIVersion string          `json:"apiVersion"`
		Kind       string          `json:"kind"`
		Items      json.RawMessage `json:"items"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		p.fail(in, decode.Mismatch(err, path))
		return
	}
	kind := head.Kind
	if kind == "" {
		kind = listKind
	}
	itemKind, isList := strings.CutSuffix(kind, "List")
	switch {
	case kind == "":
		p.fail(in, object.Error{Field: decode.Join(path, "kind"), Msg: fmt.Sprintf("is missing: want %s, %s, %s, %s, %s, %s or List",
			object.KindService, object.KindEndpointSlice, object.KindPod, object.KindServiceEntry, object.KindSidecar, object.KindServiceImport)})
	case isList && path != "": // with aliases, lists in lists could grow exponentially
		p.fail(in, object.Error{Field: path, Msg: "a List in a List is not supported"})
	case isList && len(head.Items) > 0:
		var items []json.RawMessage
		if err := json.Unmarshal(head.Items, &items); err != nil {
			p.fail(in, decode.Mismatch(err, "items"))
		}
		for i, item := range items {
			p.parseObject(in, item, fmt.Sprintf("items[%d]", i), itemKind)
		}
	case !known(head.APIVersion, kind):
		p.notes = append(p.notes, strings.TrimSpace(head.APIVersion+" "+kind)+" is not read by nametap-discovery")
	default:
		p.decode(in, data, path, kind)
	}
}

// decode decodes the JSON of an object.
func (p *parsed) decode(in located, data []byte, path, kind string) {
	var errs []object.Error
	in.Object, _, errs = decode.Decode(kind, data)
	switch {
	case len(errs) == 0:
		p.objects = append(p.objects, in)
		if s := in.Service; s != nil && s.ExternalName == "" && !s.Headless && len(s.ClusterIPs) == 0 {
			p.notes = append(p.notes, in.Key.String()+" has no spec.clusterIP, and no API server allocates one for a directory: add it to the file")
		}
	case in.Key.Name != "" && in.Sidecar != nil: // without it, workloads would see more hosts
		p.objects = append(p.objects, in)
	}
	for _, e := range errs {
		e.Field = decode.Join(path, e.Field)
		p.fail(in, e)
	}
}

// known reports whether objects with this apiVersion, which may be missing, and kind are read. The API group matters,
// because Knative, too, has a kind Service.
func known(apiVersion, kind string) bool {
	group, _, hasGroup := strings.Cut(apiVersion, "/")
	if !hasGroup {
		group = ""
	}
	want, read := decode.Group(kind)
	return read && (group == want || apiVersion == "")
}
