package cluster_test

import (
	"bufio"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/nametap/nametap/bench/agents/cluster"
)

// An event is an event of a watch.
type event struct {
	Type   string
	Object struct {
		Kind     string
		Metadata struct {
			Name, Namespace, ResourceVersion string
			Annotations                      map[string]string
		}
		Spec struct{ ClusterIP string }
	}
}

// watch begins a watch. Its events are read with the function that it returns.
func watch(t *testing.T, c *cluster.Cluster, path string) func() event {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = c.Serve(listener) }()
	t.Cleanup(func() { listener.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listener.Addr().String()+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	lines := bufio.NewScanner(response.Body)
	return func() (e event) {
		if !lines.Scan() {
			t.Fatalf("the watch has ended: %v", lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%s: %v", lines.Bytes(), err)
		}
		return e
	}
}

// A watch begins with all Services and goes on with their edits. One that continues from a version has
// the edits after it only.
func TestWatch(t *testing.T) {
	const services = 5
	c := cluster.New(services, 2)
	if _, err := c.Change(0); err != nil {
		t.Fatal(err)
	}
	c.Remove(1)
	next := watch(t, c, "/api/v1/services?watch=true&sendInitialEvents=true")
	addresses := map[string]string{}
	var e event
	for e = next(); e.Type == "ADDED"; e = next() {
		addresses[e.Object.Metadata.Name+"."+e.Object.Metadata.Namespace+".svc.cluster.local"] = e.Object.Spec.ClusterIP
	}
	if e.Type != "BOOKMARK" || e.Object.Kind != "Service" || e.Object.Metadata.Annotations["k8s.io/initial-events-end"] != "true" {
		t.Errorf("after the Services: %+v, want a bookmark", e)
	}
	if len(addresses) != services-1 || addresses[c.Host(0)] != "11.0.0.0" || addresses[c.Host(2)] != "10.0.0.2" || addresses[c.Host(1)] != "" || c.Hosts() != services-1 {
		t.Errorf("the Services are %v", addresses)
	}
	version := e.Object.Metadata.ResourceVersion

	before := time.Now()
	if _, err := c.Change(1); err != nil {
		t.Fatal(err)
	}
	c.Remove(2)
	c.Remove(2)
	want := []struct{ kind, address string }{{"ADDED", "12.0.0.1"}, {"DELETED", "11.0.0.2"}}
	again := watch(t, c, "/api/v1/services?watch=true&resourceVersion="+version)
	for i, w := range want {
		for name, next := range map[string]func() event{"first": next, "continued": again} {
			e := next()
			n, _ := strconv.Atoi(version)
			if e.Type != w.kind || e.Object.Spec.ClusterIP != w.address || e.Object.Metadata.ResourceVersion != strconv.Itoa(n+1+i) {
				t.Errorf("%s watch: %+v, want %+v of version %d", name, e, w, n+1+i)
			}
		}
	}
	if c.Edits() != 4 {
		t.Errorf("%d edits, want 4", c.Edits())
	}
	if at, ok := c.Edited(c.Host(1)); !ok || at.Before(before) {
		t.Errorf("Service 1 was edited at %v: %v", at, ok)
	}
	if _, ok := c.Edited(c.Host(3)); ok {
		t.Error("Service 3 was not edited")
	}
}

// Other resources have no objects.
func TestOtherResources(t *testing.T) {
	for path, kind := range map[string]string{
		"/apis/discovery.k8s.io/v1/endpointslices":                "EndpointSlice",
		"/api/v1/namespaces/istio-system/configmaps":              "ConfigMap",
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions": "PartialObjectMetadata",
	} {
		if e := watch(t, cluster.New(3, 1), path+"?watch=true&sendInitialEvents=true")(); e.Type != "BOOKMARK" || e.Object.Kind != kind {
			t.Errorf("%s: %+v", path, e)
		}
	}
}
