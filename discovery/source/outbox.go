package source

import (
	"reflect"
	"sync"
)

// An Outbox passes the readings of a [Source] from its goroutine to the control plane.
type Outbox struct {
	// Changed is called after every change. It must not block.
	Changed func()

	mu      sync.Mutex
	reading Reading // with all changes since the last Read
}

// Put makes r the current reading, and appends its changes to the earlier ones. It calls
// Changed if anything is new.
func (o *Outbox) Put(r Reading) {
	o.mu.Lock()
	last := o.reading
	o.reading = r
	o.reading.Changes = append(last.Changes, r.Changes...)
	o.mu.Unlock()
	last.Changes = nil
	if len(r.Changes) > 0 || !reflect.DeepEqual(last, r) {
		o.Changed()
	}
}

// Read returns the current reading, with the changes since the last call.
func (o *Outbox) Read() Reading {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.reading
	o.reading.Changes = nil
	return r
}
