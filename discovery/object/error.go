package object

import "fmt"

// Error is an error in an object, or in the place where objects are read. The object is left out,
// or stays in use in its last good form if it has one.
type Error struct {
	Cluster string `json:"cluster,omitempty"` // empty for the control plane's own one

	File  string `json:"file"`            // path below the configuration directory
	Line  int    `json:"line,omitempty"`  // from 1; 0 for the whole file
	Field string `json:"field,omitempty"` // "spec.clusterIP"; empty if the error is not about a field
	Msg   string `json:"message"`
	Kept  bool   `json:"kept,omitempty"` // the last good form of the object is in use

	Object Key `json:"-"` // the object, as far as known
}

// Error returns "file:line: field: message", after the cluster if it is another one.
func (e Error) Error() string {
	s := e.File
	if e.Line > 0 {
		s = fmt.Sprintf("%s:%d", s, e.Line)
	}
	if e.Field != "" {
		s += ": " + e.Field
	}
	if e.Cluster != "" {
		s = "cluster " + e.Cluster + ": " + s
	}
	return s + ": " + e.Msg
}
