package push

import (
	"cmp"
	"maps"
	"slices"
	"sync"
)

// streams are the open streams.
type streams struct {
	mu   sync.Mutex
	open map[*session]struct{}
}

func newStreams() *streams { return &streams{open: map[*session]struct{}{}} }

func (s *streams) add(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[one] = struct{}{}
}

func (s *streams) remove(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, one)
}

// sorted returns the open streams of a namespace, sorted for [Service.Agents]. If namespace is "", it returns all.
func (s *streams) sorted(namespace string) []*session {
	s.mu.Lock()
	all := slices.Collect(maps.Keys(s.open))
	s.mu.Unlock()
	if namespace != "" {
		all = slices.DeleteFunc(all, func(one *session) bool { return one.said().view.Namespace != namespace })
	}
	slices.SortFunc(all, func(a, b *session) int {
		one, other := a.said(), b.said()
		return cmp.Or(cmp.Compare(one.view.Namespace, other.view.Namespace), cmp.Compare(one.name, other.name), cmp.Compare(a.connected, b.connected))
	})
	return all
}
