package nds

import "time"

// Status is what a client is doing, for people and for JSON.
type Status struct {
	// Connected says that the stream stands and has brought a response.
	Connected bool   `json:"connected"`
	Address   string `json:"address"`
	// Variant is the one in use, which may be the one fallen back to.
	Variant string `json:"variant"`
	// Loaded says that there is a table in use; Version and Resources are its,
	// LastPush is when the control plane last sent it, and TableAge how long ago
	// that was, in seconds. Stale says that it came from the snapshot and no push
	// has confirmed it.
	Loaded    bool      `json:"loaded"`
	Version   string    `json:"version"`
	Resources int       `json:"resources"`
	LastPush  time.Time `json:"lastPush,omitzero"`
	TableAge  float64   `json:"tableAgeSeconds"`
	Stale     bool      `json:"stale"`
	// Nonce is that of the last response, of whatever stream.
	Nonce string `json:"nonce,omitempty"`
	// Pushes counts all responses, Rejected those that were not used.
	Pushes     uint64 `json:"pushes"`
	Rejected   uint64 `json:"rejected"`
	Reconnects uint64 `json:"reconnects"`
	// CertificateExpires is when the workload certificate does, if there is one.
	// CertificateError is why it could not be obtained or renewed; obtaining it clears
	// it.
	CertificateExpires time.Time `json:"certificateExpires,omitzero"`
	CertificateError   string    `json:"certificateError,omitempty"`
	// LastError is why the stream ended or the last push was rejected; an
	// accepted push clears it.
	LastError string `json:"lastError,omitempty"`
}

// Status returns what the client is doing now.
func (c *Client) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	if s.Loaded {
		// A snapshot may be from before the clock was set back.
		s.TableAge = max(0, time.Since(s.LastPush).Seconds())
	}
	if certificate := c.workload.valid(); certificate != nil {
		s.CertificateExpires = certificate.Leaf.NotAfter
	}
	s.CertificateError = c.workload.trouble()
	return s
}

// table is what Status says of a set that was put to use.
type table struct {
	version   string
	pushed    time.Time
	resources int
	stale     bool
}

// setTable says which table is in use, and reports whether it is the first.
func (c *Client) setTable(t table) (first bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first = !c.state.Loaded
	c.state.Loaded = true
	c.state.Version, c.state.LastPush, c.state.Stale = t.version, t.pushed, t.stale
	c.state.Resources = t.resources
	c.state.LastError = ""
	if !t.stale {
		c.state.Pushes++
	}
	if first {
		close(c.ready)
	}
	return first
}

// setRejected says that a push was not used.
func (c *Client) setRejected(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Pushes++
	c.state.Rejected++
	c.state.LastError = reason.Error()
}

// setConnected says that a response came.
func (c *Client) setConnected(nonce string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Connected = true
	c.state.Nonce = nonce
}

// setDisconnected says that there is no stream, and why.
func (c *Client) setDisconnected(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Connected = false
	c.state.LastError = reason.Error()
}

// countReconnect says that another connection is tried.
func (c *Client) countReconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.state.Reconnects++
}
