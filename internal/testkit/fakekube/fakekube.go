// Package fakekube is a small Kubernetes API server for tests: it serves watches of the objects that a test puts
// there, as streams of JSON. The tests of test/machines use a real API server.
package fakekube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// The paths of resources. Of definitions of custom resources, only the names are used.
const (
	Services       = "/api/v1/services"
	Secrets        = "/api/v1/secrets"
	ConfigMaps     = "/api/v1/configmaps"
	Namespaces     = "/api/v1/namespaces"
	EndpointSlices = "/apis/discovery.k8s.io/v1/endpointslices"
	ServiceEntries = "/apis/networking.istio.io/v1/serviceentries"
	Sidecars       = "/apis/networking.istio.io/v1/sidecars"
	ServiceImports = "/apis/multicluster.x-k8s.io/v1alpha1/serviceimports"
	BetaImports    = "/apis/multicluster.x-k8s.io/v1beta1/serviceimports"
	Definitions    = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	TokenReviews   = "/apis/authentication.k8s.io/v1/tokenreviews" // no object is put there, see SetToken
)

// isResource reports whether a path is that of a resource.
func isResource(path string) bool {
	return slices.Contains([]string{Services, Secrets, ConfigMaps, Namespaces, EndpointSlices, ServiceEntries, Sidecars, ServiceImports, BetaImports, Definitions}, path)
}

// An API is an API server. Its methods are safe for concurrent use.
type API struct {
	tb     testing.TB
	server *httptest.Server

	mu       sync.Mutex
	objects  map[string]map[string]*unstructured.Unstructured // by the path of the resource, and "namespace/name"
	changes  []change                                         // all changes; the version of an object is the number of its last change, from 1
	oldest   int                                              // watches cannot continue from versions that are older than this one
	changed  chan struct{}                                    // closed at the next change
	ended    chan struct{}                                    // closed by EndWatches
	refused  map[string]int                                   // the status of requests for a path
	requests map[string]bool                                  // the paths of all requests
	lists    map[string]int                                   // how many watches began with all objects, by path
	tokens   map[string]Token
	required string               // token that requests must have; empty for none
	versions map[string][]Version // of the groups of custom resources
}

// A Token is the result of the review of a token.
type Token struct {
	User      string // empty if the token is refused
	Audiences []string
	Error     string // why it is refused
}

// A change has an object as it was before and after the change. oldObject is nil if the object was created, and
// newObject is nil if it was deleted.
type change struct {
	path                 string
	oldObject, newObject *unstructured.Unstructured
}

// Start starts an API server without objects. It ends with the test.
func Start(tb testing.TB) *API {
	tb.Helper()
	a := &API{
		tb: tb, objects: map[string]map[string]*unstructured.Unstructured{}, refused: map[string]int{}, requests: map[string]bool{}, lists: map[string]int{}, tokens: map[string]Token{},
		versions: map[string][]Version{
			istioGroup: {{"v1", []string{"serviceentries", "sidecars"}}}, multiClusterGroup: {{"v1alpha1", []string{"serviceimports"}}},
		},
		changed: make(chan struct{}), ended: make(chan struct{}),
	}
	a.server = a.serve(a.listen(reserve(tb)))
	tb.Cleanup(func() { a.server.Close() })
	tb.Cleanup(a.EndWatches)
	return a
}

// Put creates or changes an object of the resource with this path. text is the object in YAML.
func (a *API) Put(path, text string) {
	a.tb.Helper()
	o := new(unstructured.Unstructured)
	if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
		a.tb.Fatal(err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	o.SetResourceVersion(strconv.Itoa(len(a.changes) + 1))
	key := o.GetNamespace() + "/" + o.GetName()
	a.changeLocked(change{path, a.objects[path][key], o})
	if a.objects[path] == nil {
		a.objects[path] = map[string]*unstructured.Unstructured{}
	}
	a.objects[path][key] = o
}

// Remove deletes an object of the resource with a path; key is "namespace/name". With a definition, watches end.
func (a *API) Remove(path, key string) {
	if path == Definitions {
		defer a.EndWatches()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changeLocked(change{path, a.objects[path][key], nil})
	delete(a.objects[path], key)
}

// Forget deletes all objects of a resource without an event. Watches cannot continue from an earlier version.
func (a *API) Forget(path string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changeLocked(change{path: path})
	a.oldest = len(a.changes)
	delete(a.objects, path)
}

func (a *API) changeLocked(c change) {
	a.changes = append(a.changes, c)
	close(a.changed)
	a.changed = make(chan struct{})
}

// Refuse answers requests for a path with a status; status 0 ends that. With 503, the response tells clients to wait
// for 30 s.
func (a *API) Refuse(path string, status int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refused[path] = status
}

// EndWatches ends all watches. Clients begin new ones.
func (a *API) EndWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ended)
	a.ended = make(chan struct{})
}

// Asked returns the paths of all requests so far, sorted.
func (a *API) Asked() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.requests))
}

// Lists returns how often all objects of a path were asked for.
func (a *API) Lists(path string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists[path]
}

// SetToken sets the result of reviews of a token.
func (a *API) SetToken(token string, t Token) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tokens[token] = t
}

// serveReview reviews a token. Like the API server, it returns those audiences of the token that
// the review names. It refuses a token that has none of them.
func (a *API) serveReview(w http.ResponseWriter, r *http.Request) {
	var review struct {
		Spec struct {
			Token     string   `json:"token"`
			Audiences []string `json:"audiences"`
		} `json:"spec"`
	}
	if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
		a.tb.Error(err)
	}
	a.mu.Lock()
	token, known := a.tokens[review.Spec.Token]
	a.mu.Unlock()
	audiences := slices.DeleteFunc(slices.Clone(token.Audiences), func(audience string) bool { return !slices.Contains(review.Spec.Audiences, audience) })
	result := map[string]any{"authenticated": true, "audiences": audiences, "user": map[string]any{"username": token.User}}
	switch {
	case !known:
		result = map[string]any{"error": "invalid bearer token"}
	case token.User == "":
		result = map[string]any{"error": token.Error}
	case len(audiences) == 0:
		result = map[string]any{"error": fmt.Sprintf("token audiences %q is invalid for the target audiences %q", token.Audiences, review.Spec.Audiences)}
	}
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "status": result}) // the client may have left
}

// ServeHTTP answers a request.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !a.admit(w, r) {
		return
	}
	a.mu.Lock()
	a.requests[r.URL.Path] = true
	status := a.refused[r.URL.Path]
	if status == 0 && a.undefinedLocked(r.URL.Path) {
		status = http.StatusNotFound
	}
	a.mu.Unlock()
	group, isGroup := a.groupOf(r.URL.Path)
	w.Header().Set("Content-Type", "application/json")
	watch, _ := strconv.ParseBool(r.URL.Query().Get("watch"))
	switch {
	case status != 0:
		refuse(w, status, r.URL.Path)
	case isGroup:
		a.serveVersions(w, r, group)
	case r.URL.Path == TokenReviews:
		a.serveReview(w, r)
	case watch && isResource(targetOf(r.URL.Path).resource):
		a.serveWatch(w, r)
	default:
		refuse(w, http.StatusNotFound, r.URL.Path)
	}
}

func refuse(w http.ResponseWriter, status int, path string) {
	reason := map[int]string{
		http.StatusUnauthorized: "Unauthorized", http.StatusForbidden: "Forbidden", http.StatusNotFound: "NotFound",
	}[status]
	if status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "30") // the API server sends it while it starts
	}
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":%q,"message":"%s: refused","code":%d}`, reason, path, status)
}

// A target is what a watch is about.
type target struct {
	resource  string // path of the resource in all namespaces
	namespace string // "" for all
}

// targetOf returns what a path is about.
func targetOf(path string) target {
	prefix, rest, found := strings.Cut(path, "/namespaces/")
	if namespace, resource, ok := strings.Cut(rest, "/"); found && ok {
		return target{prefix + "/" + resource, namespace}
	}
	return target{resource: path}
}

// An event is what a watch sends.
type event struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
}

// serveWatch sends the events of a resource until the client or the test ends the watch.
func (a *API) serveWatch(w http.ResponseWriter, r *http.Request) {
	selector, err := labels.Parse(r.URL.Query().Get("labelSelector"))
	if err != nil {
		a.tb.Error(err)
		return
	}
	_, name, _ := strings.Cut(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	watched := targetOf(r.URL.Path)
	selects := func(o *unstructured.Unstructured) bool {
		return o != nil && selector.Matches(labels.Set(o.GetLabels())) && (name == "" || name == o.GetName()) &&
			(watched.namespace == "" || watched.namespace == o.GetNamespace())
	}
	encoder := json.NewEncoder(w)
	a.mu.Lock()
	ended := a.ended
	events, next := a.firstLocked(r, selects)
	for {
		for ; next < len(a.changes); next++ {
			if e, ok := a.changes[next].event(next+1, watched.resource, selects); ok {
				events = append(events, e)
			}
		}
		changed := a.changed
		a.mu.Unlock()
		for _, e := range events {
			if encoder.Encode(e) != nil {
				return // the client has left
			}
		}
		events = nil
		w.(http.Flusher).Flush() //nolint:forcetypeassert // net/http's implements it
		select {
		case <-changed:
		case <-ended:
			return
		case <-r.Context().Done():
			return
		}
		a.mu.Lock()
	}
}

// firstLocked returns the first events of a watch, and the index of the first change that the watch sends after
// them. Like the API server, it accepts a watch from a version that is later than the last version; the watch then
// sends only changes after that version (kubernetes#107457). A watch that begins with a list fails at such a
// version.
func (a *API) firstLocked(r *http.Request, selects func(*unstructured.Unstructured) bool) (events []event, next int) {
	query, path := r.URL.Query(), targetOf(r.URL.Path).resource
	from, err := strconv.Atoi(query.Get("resourceVersion"))
	if query.Get("sendInitialEvents") != "true" {
		if err != nil || from < a.oldest {
			return []event{{"ERROR", failure("Expired", http.StatusGone)}}, len(a.changes)
		}
		return nil, from
	}
	a.lists[r.URL.Path]++
	if from > len(a.changes) {
		tooLarge := failure("Timeout", http.StatusGatewayTimeout)
		tooLarge["details"] = map[string]any{"causes": []any{map[string]any{"reason": metav1.CauseTypeResourceVersionTooLarge}}}
		return []event{{"ERROR", tooLarge}}, len(a.changes)
	}
	for _, key := range slices.Sorted(maps.Keys(a.objects[path])) {
		if o := a.objects[path][key]; selects(o) {
			events = append(events, event{"ADDED", o.Object})
		}
	}
	return append(events, event{"BOOKMARK", map[string]any{
		"metadata": map[string]any{
			"resourceVersion": strconv.Itoa(len(a.changes)), "annotations": map[string]string{"k8s.io/initial-events-end": "true"},
		},
	}}), len(a.changes)
}

// failure returns the object of an event that ends a watch.
func failure(reason string, code int) map[string]any {
	return map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
}

// event returns the event that a watch of a path gets for the change; ok is false if it gets none. version is the
// version of the change.
func (c change) event(version int, path string, selects func(*unstructured.Unstructured) bool) (e event, ok bool) {
	was, is := selects(c.oldObject), selects(c.newObject)
	switch {
	case c.path != path:
	case was && is:
		return event{"MODIFIED", c.newObject.Object}, true
	case is:
		return event{"ADDED", c.newObject.Object}, true
	case was:
		last := c.oldObject.DeepCopy()
		last.SetResourceVersion(strconv.Itoa(version)) // the version of the deletion, as the API server sends it
		return event{"DELETED", last.Object}, true
	}
	return event{}, false
}
