package interop

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Paths of objects at the API server; without a name the path of all objects of a namespace, and
// without a namespace of all objects of the cluster.
func servicePath(namespace, name string) string {
	return objectPath("/api/v1", namespace, "services", name)
}
func slicePath(namespace, name string) string {
	return objectPath("/apis/discovery.k8s.io/v1", namespace, "endpointslices", name)
}

func objectPath(group, namespace, resource, name string) string {
	if namespace != "" {
		group += "/namespaces/" + namespace
	}
	return strings.TrimSuffix(group+"/"+resource+"/"+name, "/")
}

// A writer writes many objects to an API server, over connections of its own. Its methods are safe
// for concurrent use.
type writer struct {
	c      *cluster
	addr   string
	client *http.Client
}

// writers is how many goroutines write at a time.
const writers = 32

// writer returns a writer to the API server with an address.
func (c *cluster) writer(addr string) *writer {
	w := &writer{c: c, addr: addr, client: &http.Client{
		Timeout: time.Minute,
		Transport: &http.Transport{
			DialContext: c.dial, MaxIdleConnsPerHost: writers,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // of a server that the test has started
		},
	}}
	c.tb.Cleanup(w.client.CloseIdleConnections)
	return w
}

// A message is an object that can be sent in protobuf, which costs the API server less than JSON.
type message interface {
	runtime.Object
	Marshal() ([]byte, error)
	Unmarshal(data []byte) error
}

// magic begins an object in protobuf; a runtime.Unknown follows, which has the object.
const magic = "k8s\x00"

// encode returns an object in protobuf.
func encode(o message) ([]byte, error) {
	raw, err := o.Marshal()
	if err != nil {
		return nil, err
	}
	version, kind := o.GetObjectKind().GroupVersionKind().ToAPIVersionAndKind()
	data, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: version, Kind: kind}, Raw: raw}).Marshal()
	return append([]byte(magic), data...), err
}

// decode reads an object in protobuf.
func decode(data []byte, into message) error {
	data, found := bytes.CutPrefix(data, []byte(magic))
	if !found {
		return errors.New("not an object in protobuf")
	}
	var object runtime.Unknown
	if err := object.Unmarshal(data); err != nil {
		return err
	}
	return into.Unmarshal(object.Raw)
}

// A request is one to an API server.
type request struct {
	method, path string
	object       message // nil for none
	result       message // into which the answer is decoded; nil if it does not matter
}

// send sends a request.
func (w *writer) send(ctx context.Context, r request) error {
	var body []byte
	var err error
	if r.object != nil {
		if body, err = encode(r.object); err != nil {
			return err
		}
	}
	request, err := http.NewRequestWithContext(ctx, r.method, "https://"+w.addr+r.path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+adminToken)
	request.Header.Set("Content-Type", runtime.ContentTypeProtobuf)
	request.Header.Set("Accept", runtime.ContentTypeProtobuf)
	response, err := w.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return err
	case response.StatusCode >= http.StatusMultipleChoices:
		return fmt.Errorf("%s %s: status %d: %q", r.method, r.path, response.StatusCode, answer)
	case r.result != nil:
		return decode(answer, r.result)
	}
	return nil
}

// must is send, and fails the test on an error. Only the goroutine of the test may call it.
func (w *writer) must(r request) {
	w.c.tb.Helper()
	if err := w.send(w.c.tb.Context(), r); err != nil {
		w.c.tb.Fatal(err)
	}
}

// create creates a Service of the population, and its EndpointSlice.
func (w *writer) create(ctx context.Context, p population, i int) error {
	if err := w.send(ctx, request{method: http.MethodPost, path: servicePath(p.namespace(i), ""), object: p.service(i, "")}); err != nil {
		return err
	}
	return w.send(ctx, request{method: http.MethodPost, path: slicePath(p.namespace(i), ""), object: p.slice(i, 0)})
}

// remove deletes a Service of the population, and its EndpointSlice.
func (w *writer) remove(ctx context.Context, p population, i int) error {
	if err := w.send(ctx, request{method: http.MethodDelete, path: servicePath(p.namespace(i), p.name(i))}); err != nil {
		return err
	}
	return w.send(ctx, request{method: http.MethodDelete, path: slicePath(p.namespace(i), p.slice(i, 0).Name)})
}

// forgotten makes the API server forget which client has written which field. Otherwise it would
// spend a sixth of the time of an edit on that.
func forgotten() []metav1.ManagedFieldsEntry { return []metav1.ManagedFieldsEntry{{}} }

// put replaces a Service of the population.
func (w *writer) put(ctx context.Context, s *corev1.Service) error {
	s.ManagedFields = forgotten()
	return w.send(ctx, request{method: http.MethodPut, path: servicePath(s.Namespace, s.Name), object: s})
}

// putSlice replaces an EndpointSlice of the population.
func (w *writer) putSlice(ctx context.Context, s *discoveryv1.EndpointSlice) error {
	s.ManagedFields = forgotten()
	return w.send(ctx, request{method: http.MethodPut, path: slicePath(s.Namespace, s.Name), object: s})
}

// all calls write for the numbers below n, several at a time, and fails the test if one fails.
func (w *writer) all(n int, write func(ctx context.Context, i int) error) {
	w.c.tb.Helper()
	ctx, cancel := context.WithCancelCause(w.c.tb.Context())
	defer cancel(nil)
	next := make(chan int)
	var group sync.WaitGroup
	for range writers {
		group.Go(func() {
			for i := range next {
				if err := write(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	for i := 0; i < n && ctx.Err() == nil; i++ {
		next <- i
	}
	close(next)
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		w.c.tb.Fatal(err)
	}
}

// populate creates a population, and ends Kubernetes' controllers, which have no more to do.
func (c *cluster) populate(p population) *writer {
	c.tb.Helper()
	begun := time.Now()
	w := c.writer(apiAddr)
	w.all(scaleNamespaces, func(ctx context.Context, i int) error {
		return w.send(ctx, request{method: http.MethodPost, path: "/api/v1/namespaces", object: &corev1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: p.namespace(i)}}})
	})
	for i := range scaleNamespaces {
		c.account(p.namespace(i))
	}
	c.managers.end(terminate)
	w.all(p.services, func(ctx context.Context, i int) error { return w.create(ctx, p, i) })
	c.tb.Logf("created %d Services with %d endpoints in %v", p.services, p.services*endpoints, time.Since(begun).Round(time.Second))
	return w
}
