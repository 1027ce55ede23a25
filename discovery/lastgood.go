package discovery

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

const (
	objectsFile   = "objects.json"
	objectsFormat = "nametap-objects/1"
)

// objectsState is the file of last good objects. Sum covers Documents.
type objectsState struct {
	Format    string          `json:"format"`
	Sum       string          `json:"sum"`
	Documents json.RawMessage `json:"documents"`
}

// savedDocument is a document of which at least one object counts. It is kept
// as its author wrote it, so that a later version of nametap reads it with its
// own eyes.
type savedDocument struct {
	File    string        `json:"file"`
	Before  int           `json:"linesBefore"`
	Text    []byte        `json:"text"`
	Objects []savedObject `json:"objects"`
}

type savedObject struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// saveObjects writes the last good form of all objects, atomically.
func saveObjects(dir string, good map[key]object) error {
	byText := map[*chunk]*savedDocument{}
	for k, o := range good {
		d := byText[o.text]
		if d == nil {
			d = &savedDocument{File: o.file, Before: o.text.offset, Text: o.text.text}
			byText[o.text] = d
		}
		d.Objects = append(d.Objects, savedObject{Kind: k.kind, Namespace: k.namespace, Name: k.name})
	}
	docs := make([]*savedDocument, 0, len(byText))
	for _, d := range byText {
		slices.SortFunc(d.Objects, func(a, b savedObject) int {
			return compareKeys(key{a.Kind, a.Namespace, a.Name}, key{b.Kind, b.Namespace, b.Name})
		})
		docs = append(docs, d)
	}
	slices.SortFunc(docs, func(a, b *savedDocument) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Before, b.Before), bytes.Compare(a.Text, b.Text))
	})
	documents, err := json.Marshal(docs)
	if err != nil {
		return fmt.Errorf("encoding the last good objects: %w", err)
	}
	data, err := json.Marshal(objectsState{Format: objectsFormat, Sum: sum(documents), Documents: documents})
	if err != nil {
		return fmt.Errorf("encoding the last good objects: %w", err)
	}
	if err := writeAtomically(filepath.Join(dir, objectsFile), append(data, '\n')); err != nil {
		return fmt.Errorf("writing the last good objects: %w", err)
	}
	return nil
}

// loadObjects reads the last good objects of dir. No file is no objects. An
// error that is errDamaged means that the file was set aside and that there
// are no objects.
func loadObjects(dir string) (map[key]object, error) {
	path := filepath.Join(dir, objectsFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[key]object{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the last good objects: %w", err)
	}
	good, err := decodeObjects(data)
	if err != nil {
		err = fmt.Errorf("file of last good objects %s is %w: %w", path, errDamaged, err)
		return map[key]object{}, setAside(path, err)
	}
	return good, nil
}

func decodeObjects(data []byte) (map[key]object, error) {
	var s objectsState
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if s.Format != objectsFormat {
		return nil, fmt.Errorf("format %q, want %q", s.Format, objectsFormat)
	}
	if sum(s.Documents) != s.Sum {
		return nil, errors.New("the checksum does not match")
	}
	var docs []savedDocument
	if err := json.Unmarshal(s.Documents, &docs); err != nil {
		return nil, fmt.Errorf("documents: %w", err)
	}
	good := map[key]object{}
	for _, d := range docs {
		p := parsed{broken: map[key]bool{}}
		p.parseDocument(d.File, &chunk{text: d.Text, offset: d.Before})
		counts := map[savedObject]bool{}
		for _, o := range d.Objects {
			counts[o] = true
		}
		for _, o := range p.objects {
			if counts[savedObject{Kind: o.key.kind, Namespace: o.key.namespace, Name: o.key.name}] {
				good[o.key] = o
			}
		}
	}
	return good, nil
}
