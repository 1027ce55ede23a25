package cluster

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"path"
	"strconv"
	"time"
)

// Serve serves the cluster on a listener, as an API server, until the listener is closed.
func (c *Cluster) Serve(listener net.Listener) error {
	s := &http.Server{Handler: http.HandlerFunc(c.serve), ReadHeaderTimeout: time.Minute}
	return s.Serve(listener)
}

// WriteKubeconfig writes a file with the access to the API server at an address.
func WriteKubeconfig(path, address string) error {
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, clusters: [{name: c, cluster: {server: "http://%s"}}], users: [{name: u, user: {}}], `+
		`contexts: [{name: x, context: {cluster: c, user: u}}], current-context: x}`, address)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return fmt.Errorf("writing a kubeconfig: %w", err)
	}
	return nil
}

// kindOf returns the version and the kind of the objects of a resource.
func kindOf(resource string) (version, kind string) {
	switch resource {
	case "services":
		return "v1", "Service"
	case "configmaps":
		return "v1", "ConfigMap"
	case "endpointslices":
		return "discovery.k8s.io/v1", "EndpointSlice"
	}
	return "v1", "Namespace"
}

// serve answers a request for a watch, and refuses all others. Services are the only objects of the cluster.
func (c *Cluster) serve(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if watch, _ := strconv.ParseBool(r.URL.Query().Get("watch")); !watch {
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","message":"%s: only watches are served","code":404}`, r.URL.Path)
		return
	}
	resource := path.Base(r.URL.Path)
	out := bufio.NewWriterSize(w, 1<<16)
	flush := func() error {
		if err := out.Flush(); err != nil {
			return err
		}
		return http.NewResponseController(w).Flush()
	}
	next, err := c.begin(out, r, resource)
	if err != nil || flush() != nil {
		return // the client has left
	}
	for {
		edits, changed := c.from(next)
		if resource == "services" && len(edits) > 0 {
			for _, e := range edits {
				writeEvent(out, e.kind, c.appendService(nil, e.service, e.state))
			}
			if flush() != nil {
				return // the client has left
			}
		}
		next += len(edits)
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// from returns the edits from a number on, and a channel that is closed at the next edit.
func (c *Cluster) from(next int) (edits []edit, changed <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.edits[next:len(c.edits):len(c.edits)], c.changed
}

// begin writes the first events of a watch. It returns the number of the edit that follows them.
func (c *Cluster) begin(out *bufio.Writer, r *http.Request, resource string) (next int, err error) {
	query := r.URL.Query()
	if query.Get("sendInitialEvents") != "true" {
		version, err := strconv.Atoi(query.Get("resourceVersion"))
		if err != nil {
			return 0, fmt.Errorf("a watch from version %q: want a number", query.Get("resourceVersion"))
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		return min(max(version-1, 0), len(c.edits)), nil
	}
	c.mu.Lock()
	states := append([]state(nil), c.states...)
	next = len(c.edits)
	c.mu.Unlock()
	if resource == "services" {
		var service []byte
		for i, s := range states {
			if !s.removed {
				service = c.appendService(service[:0], i, s)
				writeEvent(out, "ADDED", service)
			}
		}
	}
	version, kind := kindOf(resource)
	writeEvent(out, "BOOKMARK", fmt.Appendf(nil, `{"kind":%q,"apiVersion":%q,"metadata":{"resourceVersion":"%d","annotations":{"k8s.io/initial-events-end":"true"}}}`,
		kind, version, next+1))
	return next, nil
}

// writeEvent writes an event of a watch. An error shows when out is flushed.
func writeEvent(out *bufio.Writer, kind string, object []byte) {
	fmt.Fprintf(out, `{"type":%q,"object":%s}`+"\n", kind, object)
}
