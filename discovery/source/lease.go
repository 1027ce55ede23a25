package source

import (
	"errors"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// A Lease is the name of a Lease; the zero value names no Lease.
type Lease struct{ Namespace, Name string }

// String returns "NAMESPACE/NAME", or "" for none.
func (l Lease) String() string {
	if l == (Lease{}) {
		return ""
	}
	return l.Namespace + "/" + l.Name
}

// MarshalText returns the form of String.
func (l Lease) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText parses the form of String.
func (l *Lease) UnmarshalText(text []byte) error {
	if *l = (Lease{}); len(text) == 0 {
		return nil
	}
	namespace, name, found := strings.Cut(string(text), "/")
	if !found || !object.IsLabel(namespace) || !object.IsHost(name) {
		return errors.New("want NAMESPACE/NAME")
	}
	l.Namespace, l.Name = namespace, name
	return nil
}
