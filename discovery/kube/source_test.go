package kube_test

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/discovery/kube"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const (
	definition = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: serviceentries.networking.istio.io}\n"
	headless   = "apiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\nspec: {clusterIP: None, clusterIPs: [None]}\n"
)

func service(name, ip string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: shop}\nspec: {clusterIP: %s, clusterIPs: [%s]}\n", name, ip, ip)
}

func slice(name, labels, ip string) string {
	return fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
		"metadata: {name: %s, namespace: shop, labels: {kubernetes.io/service-name: db, %s}}\nendpoints: [{addresses: [%s], hostname: %s}]\n", name, labels, ip, name)
}

func entry(name, spec string) string {
	return fmt.Sprintf("apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: %s, namespace: shop}\nspec: {%s}\n", name, spec)
}

// A running source.
type running struct {
	*kube.Source
	t       *testing.T
	log     *testlog.Buffer
	objects map[object.Key]object.Object
	removed map[object.Key]bool // that were removed at any time
}

// A reading is what a source holds.
type reading struct {
	Objects []object.Object
	Errors  []object.Error
	Waiting string
}

// Read returns what the source holds.
func (r *running) Read() reading {
	changes := r.Source.Read()
	for _, c := range changes.Changes {
		for _, o := range c.Updated {
			r.objects[o.Key] = o
		}
		for _, key := range c.Removed {
			delete(r.objects, key)
			r.removed[key] = true
		}
	}
	objects := slices.SortedFunc(maps.Values(r.objects), func(a, b object.Object) int { return a.Key.Compare(b.Key) })
	return reading{objects, changes.Errors, changes.Waiting}
}

// start starts a source on an API server.
func start(t *testing.T, a *fakekube.API) *running {
	t.Helper()
	log := testlog.New(t)
	changed := make(chan struct{}, 1)
	access, err := kube.NewAccess(a.Kubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	s := access.NewObjects(source.ObjectsConfig{RootNamespace: "istio-system", Logger: log.Logger(), Changed: func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}})
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { s.Run(ctx) })
	t.Cleanup(done.Wait)
	t.Cleanup(cancel)
	return &running{s, t, log, map[object.Key]object.Object{}, map[object.Key]bool{}}
}

// want waits until the source holds these objects, and nothing is missing.
func (r *running) want(objects ...string) reading {
	r.t.Helper()
	var got reading
	var diff string
	defer func() {
		if diff != "" {
			r.t.Errorf("objects (-got +want), waiting %q:\n%s", got.Waiting, diff)
		}
	}()
	wait.Until(r.t, "the source holds the objects", func() bool {
		got = r.Read()
		var keys []string
		for _, o := range got.Objects {
			keys = append(keys, o.Key.String())
		}
		diff = cmp.Diff(keys, objects)
		return diff == "" && got.Waiting == ""
	})
	return got
}

// D6, D7, D8: of EndpointSlices, only slices of headless Services and slices written by
// other controllers are read. Nothing else is requested.
func TestRequests(t *testing.T) {
	a := fakekube.Start(t)
	a.Put(fakekube.Services, headless)
	a.Put(fakekube.Services, service("web", "10.96.0.1"))
	a.Put(fakekube.EndpointSlices, slice("db-1", "service.kubernetes.io/headless: ''", "10.244.0.1"))
	a.Put(fakekube.EndpointSlices, slice("manual", "endpointslice.kubernetes.io/managed-by: me", "192.0.2.1"))
	a.Put(fakekube.EndpointSlices, slice("web-1", "endpointslice.kubernetes.io/managed-by: endpointslice-controller.k8s.io", "10.244.0.2"))
	s := start(t, a)
	r := s.want("EndpointSlice shop/db-1", "EndpointSlice shop/manual", "Service shop/db", "Service shop/web")
	if e := r.Objects[0].Slice.Endpoints; len(e) != 1 || e[0].Hostname != "db-1" || e[0].Addrs[0].String() != "10.244.0.1" {
		t.Errorf("%+v", e)
	}
	want := []string{fakekube.Namespaces, fakekube.Namespaces + "/istio-system/configmaps", fakekube.Services, fakekube.EndpointSlices, "/apis/multicluster.x-k8s.io", "/apis/networking.istio.io"}
	if diff := cmp.Diff(a.Asked(), want); diff != "" {
		t.Errorf("requests (-got +want):\n%s", diff)
	}
}

// D14: a custom resource whose definition is missing is no error. It is read as soon as it is
// installed, and its objects end with it.
func TestLateDefinition(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	s := start(t, a)
	s.want()
	a.Put(fakekube.ServiceEntries, entry("api", "hosts: [api.example.com], addresses: [192.0.2.1], resolution: DNS"))
	a.Put(fakekube.Definitions, definition)
	s.want("ServiceEntry shop/api")
	a.Remove(fakekube.Definitions, "/serviceentries.networking.istio.io")
	s.want()
	a.Put(fakekube.Definitions, definition)
	s.want("ServiceEntry shop/api")
	a.Put(fakekube.ServiceEntries, entry("more", "hosts: [more.example.com], addresses: [192.0.2.2], resolution: DNS"))
	s.want("ServiceEntry shop/api", "ServiceEntry shop/more")
	if lines := s.log.Count("level=ERROR"); lines > 0 {
		t.Errorf("%d errors in the log", lines)
	}
}

// D14: the version of a custom resource that is followed is one that is served. If that ends while no change
// of the definition is seen, another one is followed.
func TestVersions(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	a.SetVersions(fakekube.Version{Name: "v1beta1", Resources: []string{"serviceentries"}})
	a.Put(fakekube.Definitions, definition)
	a.Put(fakekube.ServiceEntries, entry("api", "hosts: [api.example.com], addresses: [192.0.2.1], resolution: DNS"))
	s := start(t, a)
	wait.Until(t, "the version that is not served is named", func() bool {
		return strings.Contains(s.Read().Waiting, "serviceentries cannot be read: ")
	})
	a.SetVersions(fakekube.Version{Name: "v2", Resources: []string{"gateways"}}, fakekube.Version{Name: "v1", Resources: []string{"serviceentries"}})
	s.want("ServiceEntry shop/api")
}

// D17: a resource that is forbidden is named, and the others are read.
func TestForbidden(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	a.Refuse(fakekube.Services, http.StatusForbidden)
	a.Put(fakekube.EndpointSlices, slice("db-1", "service.kubernetes.io/headless: ''", "10.244.0.1"))
	s := start(t, a)
	wait.Until(t, "the reading names the resource", func() bool {
		r := s.Read()
		return len(r.Objects) == 0 && strings.Contains(r.Waiting, "services cannot be read: ") && strings.Contains(r.Waiting, "refused")
	})
	wait.Until(t, "the log names the resource", func() bool { return s.log.Count("cannot read from the Kubernetes API", "what=services") > 0 })
	a.Put(fakekube.Services, headless)
	a.Refuse(fakekube.Services, 0)
	s.want("EndpointSlice shop/db-1", "Service shop/db")
	wait.Until(t, "no resource fails", func() bool {
		return !slices.ContainsFunc(s.Status(), func(st source.Status) bool {
			return st.Failure != "" || !st.Synced || st.Heard.IsZero() && st.Objects > 0
		})
	})
}

// D18: what is wrong with an object is named and left out, so that its form depends on the object alone: a replica
// that has seen it when it was good has the same one as a replica that starts later.
func TestBrokenObject(t *testing.T) {
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, definition)
	const good = "hosts: [api.example.com, b.example.com], addresses: [192.0.2.1, 192.0.2.2], resolution: DNS, exportTo: ['.', other]"
	a.Put(fakekube.ServiceEntries, entry("api", good))
	old := start(t, a)
	old.want("ServiceEntry shop/api")
	a.Put(fakekube.ServiceEntries, entry("api", "hosts: [api.example.com, 'not a host'], addresses: [192.0.2.1, nonsense], resolution: dns, exportTo: ['.', 'no scope']"))
	a.Put(fakekube.ServiceEntries, entry("bad", "hosts: ['not a host'], resolution: DNS"))
	want := []string{
		`ServiceEntry shop/api: spec.hosts[1]: want a DNS name or *.suffix, got "not a host"`,
		`ServiceEntry shop/api: spec.addresses[1]: want an IP address, got "nonsense"`,
		`ServiceEntry shop/api: spec.resolution: want NONE, STATIC, DNS, DNS_ROUND_ROBIN or DYNAMIC_DNS, got "dns"`,
		`ServiceEntry shop/api: spec.exportTo: want namespaces, ".", "*" or "~", got "no scope"`,
		`ServiceEntry shop/bad: spec.hosts[0]: want a DNS name or *.suffix, got "not a host"`,
	}
	for replica, s := range map[string]*running{"old": old, "new": start(t, a)} {
		s.want("ServiceEntry shop/api", "ServiceEntry shop/bad")
		wait.Until(t, "both objects are named", func() bool { return len(s.Read().Errors) == len(want) })
		r := s.Read()
		entry := r.Objects[0].Entry
		form := fmt.Sprint(entry.Hosts, entry.Addrs, entry.Resolution, entry.ExportTo)
		if form != "[api.example.com] [192.0.2.1]NONE{false true [shop]}" {
			t.Errorf("%s replica: the form is %s", replica, form)
		}
		var got []string
		for _, e := range r.Errors {
			got = append(got, e.Error())
		}
		if diff := cmp.Diff(got, want); diff != "" {
			t.Errorf("%s replica: errors (-got +want):\n%s", replica, diff)
		}
	}
	a.Put(fakekube.ServiceEntries, entry("api", good))
	wait.Until(t, "one object is named", func() bool { return len(old.Read().Errors) == 1 })
	a.Remove(fakekube.ServiceEntries, "shop/bad")
	wait.Until(t, "no object is named", func() bool { return len(old.Read().Errors) == 0 })
}

// D12, D18: an object with a field of another type than its kind has makes no host, and is named. A Sidecar shows no host.
func TestMistypedObject(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Definitions, definition)
	a.Put(fakekube.Definitions, strings.Replace(definition, "serviceentries", "sidecars", 1))
	a.Put(fakekube.ServiceEntries, entry("api", "hosts: [api.example.com], addresses: [192.0.2.1], resolution: DNS"))
	s := start(t, a)
	s.want("ServiceEntry shop/api")
	a.Put(fakekube.ServiceEntries, entry("api", "hosts: [api.example.com], addresses: [192.0.2.1], resolution: DNS, exportTo: '.'"))
	a.Put(fakekube.Sidecars, "apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: web, namespace: shop}\nspec: {workloadSelector: {labels: {app: web}}, egress: ./web}\n")
	r := s.want("Sidecar shop/web")
	if got := r.Objects[0].Sidecar; got.Labels["app"] != "web" || got.Egress == nil || len(got.Egress) > 0 {
		t.Errorf("the Sidecar is %+v", got)
	}
	wait.Until(t, "both objects are named", func() bool { return len(s.Read().Errors) == 2 })
	want := "[ServiceEntry shop/api: spec.exportTo: want a list, got a string Sidecar shop/web: spec.egress: want a list, got a string]"
	if got := fmt.Sprint(s.Read().Errors); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// D15, D16: while the API server is away nothing changes. When it is back, what was deleted
// meanwhile is removed, and the rest stays.
func TestRelist(t *testing.T) {
	t.Parallel()
	a := fakekube.Start(t)
	a.Put(fakekube.Services, service("old", "10.96.0.1"))
	a.Put(fakekube.Services, service("kept", "10.96.0.2"))
	s := start(t, a)
	s.want("Service shop/kept", "Service shop/old")
	a.Refuse(fakekube.Services, http.StatusServiceUnavailable)
	a.EndWatches()
	wait.Until(t, "the failure is known", func() bool {
		return slices.ContainsFunc(s.Status(), func(st source.Status) bool {
			return st.Resource == "services" && st.Failure != "" && !st.FailingSince.IsZero()
		})
	})
	s.want("Service shop/kept", "Service shop/old")
	a.Forget(fakekube.Services)
	a.Put(fakekube.Services, service("kept", "10.96.0.3"))
	a.Put(fakekube.Services, service("new", "10.96.0.4"))
	a.Refuse(fakekube.Services, 0)
	r := s.want("Service shop/kept", "Service shop/new")
	if got := r.Objects[0].Service.ClusterIPs[0].String(); got != "10.96.0.3" {
		t.Errorf("kept has the address %s", got)
	}
	wait.Until(t, "the log of the recovery", func() bool { return s.log.Count("reading from the Kubernetes API again", "what=services") > 0 })
}
