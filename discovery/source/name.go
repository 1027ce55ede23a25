package source

import (
	"errors"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// A Name names an object whose kind follows from the context, such as a Secret. The zero value names
// no object.
type Name struct{ Namespace, Name string }

// String returns "NAMESPACE/NAME", or "" for the zero value.
func (n Name) String() string {
	if n == (Name{}) {
		return ""
	}
	return n.Namespace + "/" + n.Name
}

// MarshalText returns the form of String.
func (n Name) MarshalText() ([]byte, error) { return []byte(n.String()), nil }

// UnmarshalText parses the form of String.
func (n *Name) UnmarshalText(text []byte) error {
	if *n = (Name{}); len(text) == 0 {
		return nil
	}
	namespace, name, found := strings.Cut(string(text), "/")
	if !found || !object.IsLabel(namespace) || !object.IsHost(name) {
		return errors.New("want NAMESPACE/NAME")
	}
	n.Namespace, n.Name = namespace, name
	return nil
}
