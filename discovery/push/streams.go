package push

import (
	"cmp"
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

// A listed is a stream, with the info of its client at the time when the list was made.
type listed struct {
	*session
	info *subscriber
}

// sorted returns the open streams of a namespace, sorted for [Service.Agents]. If namespace is "", it returns all.
func (s *streams) sorted(namespace string) []listed {
	s.mu.Lock()
	all := make([]listed, 0, len(s.open))
	for one := range s.open {
		all = append(all, listed{session: one})
	}
	s.mu.Unlock()
	for i := range all {
		if all[i].info = all[i].session.info.Load(); all[i].info == nil {
			all[i].info = &subscriber{}
		}
	}
	if namespace != "" {
		all = slices.DeleteFunc(all, func(one listed) bool { return one.info.view.Namespace != namespace })
	}
	slices.SortFunc(all, func(a, b listed) int {
		return cmp.Or(cmp.Compare(a.info.view.Namespace, b.info.view.Namespace), cmp.Compare(a.info.name, b.info.name), cmp.Compare(a.connected, b.connected))
	})
	return all
}
