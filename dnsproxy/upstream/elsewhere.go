package upstream

import (
	"container/list"
	"net/netip"
)

// Bounds for servers that are asked although they are not configured. Clients choose these servers, and may choose any
// number of them.
const (
	// maxElsewhere is how many such servers are remembered.
	maxElsewhere = 256
	// maxElsewhereSockets bounds the sockets to all of them. Each costs a descriptor and one or two goroutines.
	maxElsewhereSockets = 512
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

// evict makes room for another server, and returns the server that it has removed for that, if any. This is the server
// that was asked least recently of those that have never replied or, if all have, of all. The caller must close it.
func (e *elsewhere) evict() *server {
	if e.recent.Len() < maxElsewhere {
		return nil
	}
	victim := e.recent.Back()
	for element := victim; element != nil; element = element.Prev() {
		if !serverOf(element).hasReplied() {
			victim = element
			break
		}
	}
	s := serverOf(victim)
	e.recent.Remove(victim)
	delete(e.byAddr, s.spec.Addr)
	s.evicted.Store(true)
	return s
}
