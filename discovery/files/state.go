package files

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/statedir"
	"github.com/nametap/nametap/internal/yamltext"
)

// The file of the last good objects in the state directory.
const (
	objectsFile   = "objects.json"
	objectsFormat = "nametap-objects/1"
)

// savedDocument is a document with at least one object in use. The file has the text
// of the document and not the decoded objects: a later version of nametap can then read fields that this version
// does not know.
type savedDocument struct {
	File    string       `json:"file"`
	Number  int          `json:"document"`
	Text    []byte       `json:"text"`
	Objects []object.Key `json:"objects"`
}

// saveObjects writes the last good objects to the state directory.
func saveObjects(dir *statedir.Dir, good map[object.Key]located) error {
	byText := map[*yamltext.Document]*savedDocument{}
	for k, o := range good {
		d := byText[o.text]
		if d == nil {
			d = &savedDocument{File: o.file, Number: o.document, Text: o.text.Body}
			byText[o.text] = d
		}
		d.Objects = append(d.Objects, k)
	}
	docs := make([]*savedDocument, 0, len(byText))
	for _, d := range byText {
		slices.SortFunc(d.Objects, object.Key.Compare)
		docs = append(docs, d)
	}
	slices.SortFunc(docs, func(a, b *savedDocument) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Number, b.Number), bytes.Compare(a.Text, b.Text))
	})
	if err := dir.Save(objectsFile, objectsFormat, docs); err != nil {
		return fmt.Errorf("writing the last good objects (--state-dir): %w", err)
	}
	return nil
}

// loadObjects reads the last good objects from a state directory. It returns no objects if there is no file. If the
// file is damaged, loadObjects moves it aside, and returns [statedir.ErrDamaged].
func loadObjects(dir *statedir.Dir) (map[object.Key]located, error) {
	good := map[object.Key]located{}
	if dir == nil {
		return good, nil
	}
	var docs []savedDocument
	err := dir.Load(objectsFile, objectsFormat, func(data json.RawMessage) error { return json.Unmarshal(data, &docs) })
	if errors.Is(err, fs.ErrNotExist) {
		return good, nil
	}
	if err != nil {
		return good, fmt.Errorf("reading the last good objects (--state-dir): %w", err)
	}
	for _, d := range docs {
		p := parsed{file: d.File, broken: map[object.Key]bool{}}
		p.parseDocument(d.Number, &yamltext.Document{Body: d.Text})
		for _, o := range p.objects {
			if slices.Contains(d.Objects, o.Key) {
				good[o.Key] = o
			}
		}
	}
	return good, nil
}
