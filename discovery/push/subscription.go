package push

import (
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// maxNames bounds the names that a client requests, in bytes. A mesh of 10,000 namespaces has some
// hundred kilobytes of them.
const maxNames = 1 << 20

// A subscription says which resources a client wants.
type subscription struct {
	names map[string]bool
	all   bool // it wants all resources
	began bool // it has requested some
	size  int  // of names, in bytes
}

// errNames is the end of a stream whose client requests more than maxNames.
var errNames = status.Errorf(codes.ResourceExhausted, "want at most %d bytes of resource names: request all, with no name or %q", maxNames, wildcard)

// check returns an error if there are too many names.
func (s *subscription) check() error {
	if s.size > maxNames {
		return errNames
	}
	return nil
}

// A wildcard is the name of all resources. A first request without names means the same.
const wildcard = "*"

// set makes names all those that are wanted (state-of-the-world).
func (s *subscription) set(names []string) {
	s.all = slices.Contains(names, wildcard) || len(names) == 0 && (!s.began || s.all && len(s.names) == 0)
	s.names, s.size, s.began = nil, 0, true
	s.add(names)
}

// change adds and removes names (incremental).
func (s *subscription) change(added, removed []string) {
	s.all = s.all || slices.Contains(added, wildcard) || !s.began && len(added) == 0
	s.began = true
	s.add(added)
	for _, name := range removed {
		s.all = s.all && name != wildcard
		if _, ok := s.names[name]; ok {
			delete(s.names, name)
			s.size -= len(name)
		}
	}
}

func (s *subscription) add(names []string) {
	for _, name := range names {
		if s.names == nil {
			s.names = map[string]bool{}
		}
		if _, ok := s.names[name]; !ok {
			s.size += len(name)
		}
		s.names[name] = name != wildcard
	}
}

// covers reports whether a table is wanted. Every subscription covers the unnamed one: a client that
// does not merge cannot request it by name, and istiod ignores names, too.
func (s *subscription) covers(name string) bool {
	return s.all || s.names[name] || name == "" && len(s.names) > 0
}
