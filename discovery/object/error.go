package object

import (
	"fmt"
	"slices"

	"github.com/nametap/nametap/internal/clip"
)

const (
	// maxErrors bounds the errors of an object that are kept: 1 MiB of wrong values may have 100,000 errors.
	maxErrors = 20
	// maxErrorText bounds each text in an error, in bytes.
	maxErrorText = 512
)

// Error is an error in an object, or in the place where objects are read. A source may leave out an
// object with errors, use its last good form, or use it without the parts that have errors.
type Error struct {
	Cluster string `json:"cluster,omitempty"` // empty for the control plane's own cluster

	File     string `json:"file"`               // path below the configuration directory; at an API server, the name of the object
	Document int    `json:"document,omitempty"` // number of the YAML document in the file, from 1; 0 for the whole file
	Field    string `json:"field,omitempty"`    // "spec.clusterIP"; empty if the error is not about a field
	Msg      string `json:"message"`
	Kept     bool   `json:"kept,omitempty"` // the last good form of the object is in use

	Object Key `json:"-"` // the object; what is not known of it is empty
}

// Error returns "file, document 2, Service shop/web: field: message", after the name of the cluster if it is not the own
// cluster. What is not known is left out.
func (e Error) Error() string {
	s := Place(e.File, e.Document)
	if name := e.Object.String(); e.Object.Name != "" && e.Document > 0 {
		s += ", " + name
	}
	if e.Field != "" {
		s += ": " + e.Field
	}
	if e.Cluster != "" {
		s = "cluster " + e.Cluster + ": " + s
	}
	return s + ": " + e.Msg
}

// Place returns "file, document 2", or the file alone for document 0.
func Place(file string, document int) string {
	if document == 0 {
		return file
	}
	return fmt.Sprintf("%s, document %d", file, document)
}

// AppendError appends e to the errors of the same object, unless errs has it already. After maxErrors errors, it appends
// one that says that there are further errors.
func AppendError(errs []Error, e Error) []Error {
	if len(errs) > maxErrors {
		return errs
	}
	e.Field, e.Msg = clip.Text(e.Field, maxErrorText), clip.Text(e.Msg, maxErrorText)
	switch {
	case slices.Contains(errs, e):
		return errs
	case len(errs) == maxErrors:
		e.Field, e.Msg = "", "there are further errors"
	}
	return append(errs, e)
}
