// Package cluster has the objects of a simulated cluster: a number of Services, each of which is a
// function of its number and of how often it was edited. [Cluster] serves them to control planes as an API
// server does. It does no more than a watch needs, so it takes little processor time.
package cluster

import (
	"fmt"
	"sync"
	"time"
)

// A Cluster is a number of Services. Its methods are safe for concurrent use.
type Cluster struct {
	services, namespaces int

	mu      sync.Mutex
	states  []state
	edits   []edit // all edits since the start; the version of the objects is the number of edits plus 1
	edited  map[string]time.Time
	changed chan struct{} // closed at the next edit
}

// A state is the state of a Service.
type state struct {
	edits   int
	removed bool
	version int // the number of edits of all Services, up to the last edit of this Service; 0 before it
}

// An edit is a change of a Service, and its state after it.
type edit struct {
	service int
	kind    string // of a watch event
	state   state
}

// New returns a cluster.
func New(services, namespaces int) *Cluster {
	return &Cluster{
		services: services, namespaces: namespaces,
		states: make([]state, services), edited: map[string]time.Time{}, changed: make(chan struct{}),
	}
}

// Namespaces returns the names of all namespaces.
func (c *Cluster) Namespaces() []string {
	var all []string
	for i := range c.namespaces {
		all = append(all, c.namespace(i))
	}
	return all
}

func (c *Cluster) namespace(i int) string { return fmt.Sprintf("ns-%03d", i%c.namespaces) }

func name(i int) string { return fmt.Sprintf("svc-%06d", i) }

// Host returns the host of a Service.
func (c *Cluster) Host(i int) string { return name(i) + "." + c.namespace(i) + ".svc.cluster.local" }

// Len returns the number of Services, of which some may be removed.
func (c *Cluster) Len() int { return c.services }

// Change gives a Service another address. It creates the Service if it is removed. It returns the time of
// the edit.
func (c *Cluster) Change(i int) (time.Time, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kind := "MODIFIED"
	if c.states[i].removed {
		kind = "ADDED"
	}
	return c.editLocked(i, kind), nil
}

// Remove deletes a Service, unless it is removed already.
func (c *Cluster) Remove(i int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.states[i].removed {
		c.editLocked(i, "DELETED")
	}
}

func (c *Cluster) editLocked(i int, kind string) time.Time {
	now := time.Now()
	s := &c.states[i]
	s.edits++
	s.removed = kind == "DELETED"
	s.version = len(c.edits) + 1
	c.edits = append(c.edits, edit{i, kind, *s})
	c.edited[c.Host(i)] = now
	close(c.changed)
	c.changed = make(chan struct{})
	return now
}

// Edited returns when a host was last edited.
func (c *Cluster) Edited(host string) (at time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at, ok = c.edited[host]
	return at, ok
}

// Edits returns the number of edits.
func (c *Cluster) Edits() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.edits)
}

// Hosts returns the number of Services that are not removed.
func (c *Cluster) Hosts() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, s := range c.states {
		if !s.removed {
			n++
		}
	}
	return n
}

// appendService appends a Service in JSON.
func (c *Cluster) appendService(b []byte, i int, s state) []byte {
	return fmt.Appendf(b, `{"kind":"Service","apiVersion":"v1","metadata":{"name":%q,"namespace":%q,"uid":"%08d","resourceVersion":"%d"},`+
		`"spec":{"clusterIP":"%[5]s","clusterIPs":["%[5]s"],"type":"ClusterIP","ports":[{"name":"http","protocol":"TCP","port":80,"targetPort":8080}]}}`,
		name(i), c.namespace(i), i, s.version+1, address(i, s.edits))
}

// address returns the address of a Service after n edits.
func address(i, n int) string {
	return fmt.Sprintf("%d.%d.%d.%d", 10+n%100, i>>16&255, i>>8&255, i&255)
}
