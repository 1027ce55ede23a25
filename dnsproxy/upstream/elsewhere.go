package upstream

import (
	"container/list"
	"net/netip"
)

// Bounds for servers that are asked although they are not configured. Clients choose
// these servers, and may choose any number of them.
const (
	// maxElsewhere is how many such servers are remembered.
	maxElsewhere = 512
	// While evictElsewhereSockets sockets or more are open to such servers, each new server evicts servers that have
	// not replied.
	evictElsewhereSockets = 256
)

// elsewhere holds the servers of [Client.Elsewhere]. The client's mutex guards it.
type elsewhere struct {
	byAddr map[netip.AddrPort]*list.Element
	recent *list.List // of *Group; the group asked last is at the front
}

func newElsewhere() elsewhere {
	return elsewhere{byAddr: make(map[netip.AddrPort]*list.Element), recent: list.New()}
}

// serverOf returns the server of an element of the list.
func serverOf(e *list.Element) *server {
	return e.Value.(*Group).servers[0] //nolint:forcetypeassert // no other type is put in
}

func (e *elsewhere) servers() []*server {
	servers := make([]*server, 0, e.recent.Len())
	for element := e.recent.Front(); element != nil; element = element.Next() {
		servers = append(servers, serverOf(element))
	}
	return servers
}

// evict removes servers that have never replied, beginning with the server that was asked least recently, until it
// has removed one with open sockets. It appends the removed servers to victims. It does not remove a server that has
// replied, but moves it to the front of the list, as if it had just been asked. If the list still has maxElsewhere
// servers after that, evict removes the last one, whether it has replied or not.
func (e *elsewhere) evict(victims []*server) []*server {
	const steps = 32 // a bound, because in a flood evict is called for each query
	for range min(steps, e.recent.Len()) {
		element := e.recent.Back()
		s := serverOf(element)
		if s.hasReplied() {
			e.recent.MoveToFront(element)
			continue
		}
		hadSockets := s.open.Load() > 0
		victims = append(victims, e.remove(element))
		if hadSockets {
			return victims
		}
	}
	if e.recent.Len() >= maxElsewhere {
		victims = append(victims, e.remove(e.recent.Back()))
	}
	return victims
}

// remove forgets a server and returns it. The caller must close it.
func (e *elsewhere) remove(element *list.Element) *server {
	s := serverOf(element)
	e.recent.Remove(element)
	delete(e.byAddr, s.spec.Addr)
	s.evicted.Store(true)
	return s
}
