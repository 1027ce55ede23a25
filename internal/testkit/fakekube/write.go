package fakekube

import (
	"bytes"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes/scheme"
)

// A target is what a request is about.
type target struct {
	resource  string // path of the resource in all namespaces
	namespace string // "" for all
	name      string // "" for all
}

// targetOf returns what a path is about. The path of an object's status counts as the path of the object.
func targetOf(path string) target {
	if name, found := strings.CutPrefix(path, Webhooks+"/"); found { // webhooks have no namespace
		return target{resource: Webhooks, name: name}
	}
	prefix, rest, found := strings.Cut(path, "/namespaces/")
	parts := strings.Split(strings.TrimSuffix(rest, "/status"), "/")
	if !found || len(parts) < 2 {
		return target{resource: path}
	}
	t := target{resource: prefix + "/" + parts[1], namespace: parts[0]}
	if len(parts) > 2 {
		t.name = parts[2]
	}
	return t
}

// serveGet answers a request for one object.
func (a *API) serveGet(w http.ResponseWriter, r *http.Request) {
	t := targetOf(r.URL.Path)
	o := a.Object(t.resource, t.namespace+"/"+t.name)
	if o == nil {
		refuse(w, http.StatusNotFound, r.URL.Path)
		return
	}
	_ = json.NewEncoder(w).Encode(o.Object) // the client may have left
}

// Object returns an object, or nil; key is "namespace/name".
func (a *API) Object(path, key string) *unstructured.Unstructured {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.objects[path][key]
}

// HoldWrites makes the next n writing requests wait until all n have arrived.
func (a *API) HoldWrites(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.heldWrites, a.released = n, make(chan struct{})
}

// Writes returns how many writing requests there were, by method, resource and status. A key is,
// for example, "POST /api/v1/secrets Created".
func (a *API) Writes() map[string]int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.writeCounts)
}

// await waits until a writing request may go on: see [API.HoldWrites].
func (a *API) await(r *http.Request) {
	a.mu.Lock()
	released := a.released
	if a.heldWrites > 0 {
		if a.heldWrites--; a.heldWrites == 0 {
			close(a.released)
		}
	}
	a.mu.Unlock()
	if released == nil {
		return
	}
	select {
	case <-released:
	case <-r.Context().Done():
	}
}

// serveWrite creates, replaces or patches an object.
func (a *API) serveWrite(w http.ResponseWriter, r *http.Request) {
	a.await(r)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has left
	}
	t := targetOf(r.URL.Path)
	if body, err = asJSON(body); err != nil {
		a.tb.Error(err)
	}
	status, stored := a.write(r.Method, t, body)
	a.mu.Lock()
	a.writeCounts[r.Method+" "+t.resource+" "+http.StatusText(status)]++
	a.mu.Unlock()
	switch {
	case stored == nil && r.Method == http.MethodPost:
		refuseFor(w, status, "AlreadyExists", r.URL.Path)
		return
	case stored == nil:
		refuse(w, status, r.URL.Path)
		return
	}
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(stored.Object) // the client may have left
}

// asJSON returns a body in JSON. Clients may send built-in types as protobuf, in an envelope that begins with "k8s".
func asJSON(body []byte) ([]byte, error) {
	if !bytes.HasPrefix(body, []byte("k8s\x00")) {
		return body, nil
	}
	o, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return nil, err
	}
	return json.Marshal(o)
}

// write stores what a request says. It returns the status, and the object if it is stored.
func (a *API) write(method string, t target, body []byte) (status int, stored *unstructured.Unstructured) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if before := a.objects[t.resource][t.namespace+"/"+t.name]; bytes.HasPrefix(body, []byte("[")) && before != nil {
		body = a.patched(before, body)
		method = http.MethodPut
	}
	o := new(unstructured.Unstructured)
	if err := json.Unmarshal(body, &o.Object); err != nil {
		a.tb.Error(err)
		return http.StatusBadRequest, nil
	}
	if method == http.MethodPost {
		t.name = o.GetName()
	}
	before := a.objects[t.resource][t.namespace+"/"+t.name]
	switch {
	case method == http.MethodPost && before != nil:
		return http.StatusConflict, nil
	case method == http.MethodPost:
		status = http.StatusCreated
	case before == nil:
		return http.StatusNotFound, nil
	case o.GetUID() != "" && o.GetUID() != before.GetUID():
		return http.StatusConflict, nil
	case o.GetResourceVersion() != "" && o.GetResourceVersion() != before.GetResourceVersion():
		return http.StatusConflict, nil
	case method == http.MethodPatch:
		changed := o.Object
		o = before.DeepCopy()
		merge(o.Object, changed)
		status = http.StatusOK
	default:
		status = http.StatusOK
	}
	o.SetNamespace(t.namespace)
	a.putLocked(t.resource, o)
	return status, o
}

// patched returns an object in JSON after a JSON patch (RFC 6902).
func (a *API) patched(o *unstructured.Unstructured, text []byte) []byte {
	patch, err := jsonpatch.DecodePatch(text)
	if err != nil {
		a.tb.Errorf("%v: %s", err, text)
		return nil
	}
	before, err := o.MarshalJSON()
	if err != nil {
		a.tb.Error(err)
	}
	after, err := patch.Apply(before)
	if err != nil {
		a.tb.Errorf("%v: %s", err, text)
	}
	return after
}

// merge applies a merge patch (RFC 7396).
func merge(to, patch map[string]any) {
	for name, value := range patch {
		inner, ok := value.(map[string]any)
		if current, both := to[name].(map[string]any); ok && both {
			merge(current, inner)
			continue
		}
		if value == nil {
			delete(to, name)
			continue
		}
		to[name] = value
	}
}
