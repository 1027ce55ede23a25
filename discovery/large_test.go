package discovery

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// list returns n elements, separated by commas. The first argument of the format is the number of the element.
func list(n int, format string, args ...any) string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf(format, append([]any{i}, args...)...)
	}
	return strings.Join(all, ",")
}

// D64: a host of several objects is bounded, too: a headless Service whose EndpointSlices have different ports, and a host
// of several ServiceEntries. An alias of such a host is left out with it.
func TestLargeHosts(t *testing.T) {
	t.Parallel()
	const slices, endpoints, ports = 20, 200, 100
	a, log := fakekube.Start(t), testlog.New(t)
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	a.Put(fakekube.Services, "{apiVersion: v1, kind: Service, metadata: {name: db, namespace: evil}, spec: {clusterIP: None}}")
	a.Put(fakekube.Services, "{apiVersion: v1, kind: Service, metadata: {name: alias, namespace: evil}, spec: {type: ExternalName, externalName: db.evil.svc.cluster.local}}")
	for s := range slices {
		a.Put(fakekube.EndpointSlices, fmt.Sprintf("{apiVersion: discovery.k8s.io/v1, kind: EndpointSlice, addressType: IPv4, "+
			"metadata: {name: s%d, namespace: evil, labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ''}}, ports: [%s], endpoints: [%s]}",
			s, list(ports, "{name: p%[1]d, port: %[2]d%02[1]d}", 10+s), list(endpoints, "{addresses: ['10.1.%[2]d.%[1]d']}", s)))
	}
	for e := range 20 {
		a.Put(fakekube.ServiceEntries, fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e%d, namespace: evil}, "+
			"spec: {hosts: [api.example.com], resolution: STATIC, addresses: [%s]}}", e, list(6000, "'2001:db8::%[2]x:%[1]x'", e)))
	}
	cfg := onAPI(t, a)
	cfg.Logger = log.Logger()
	r := start(t, cfg)
	c := openDelta(t, r, node(t, "shop"), nil)
	hosts := func() string {
		var all []string
		for _, host := range []string{"web.shop.svc.cluster.local", "db.evil.svc.cluster.local", "alias.evil.svc.cluster.local", "api.example.com"} {
			if merged(t, c.state()).GetTable()[host] != nil {
				all = append(all, host)
			}
		}
		return strings.Join(all, " ")
	}
	c.next()
	if got := hosts(); got != "web.shop.svc.cluster.local" {
		t.Errorf("the table has %s", got)
	}
	for _, host := range []string{"db.evil.svc.cluster.local", "api.example.com"} {
		wait.Until(t, "the log names "+host, func() bool { return log.Count("a host has more than 4096 KiB in tables", host) == 1 })
	}
	for s := 5; s < slices; s++ {
		a.Remove(fakekube.EndpointSlices, fmt.Sprint("evil/s", s))
		a.Remove(fakekube.ServiceEntries, fmt.Sprint("evil/e", s))
	}
	for got, want := "", "web.shop.svc.cluster.local db.evil.svc.cluster.local alias.evil.svc.cluster.local api.example.com"; got != want; got = hosts() {
		c.next()
	}
}

// D64: a namespace whose hosts are too large for the tables of other namespaces is hidden from them, and named, until it is
// smaller. The hosts of other namespaces stay.
func TestLargeNamespace(t *testing.T) {
	t.Parallel()
	entry := func(name, spec string) string {
		return fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: %s, namespace: evil}, spec: {resolution: NONE, %s}}", name, spec)
	}
	tests := map[string]struct {
		put    func(a *fakekube.API, i int)
		remove func(a *fakekube.API, i int)
		most   int // objects
		hosts  int // of an object
		others int // hosts of the namespace, besides
	}{
		"ServiceEntries": {
			put: func(a *fakekube.API, i int) {
				a.Put(fakekube.ServiceEntries, entry(fmt.Sprint("e", i), fmt.Sprintf("exportTo: [shop, data], hosts: [%s], addresses: [%s]",
					list(250, "h%[1]d-%[2]d.example.com", i), list(230, "'2001:db8::%[2]x:%[1]x'", i))))
			},
			remove: func(a *fakekube.API, i int) { a.Remove(fakekube.ServiceEntries, fmt.Sprint("evil/e", i)) },
			most:   7, hosts: 250,
		},
		"aliases": {
			put: func(a *fakekube.API, i int) {
				if i == 0 {
					for e := range 10 {
						a.Put(fakekube.ServiceEntries, entry(fmt.Sprint("e", e), fmt.Sprintf("hosts: [one.example.com], addresses: [%s]", list(5000, "'2001:db8::%[2]x:%[1]x'", e))))
					}
				}
				a.Put(fakekube.Services, fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {name: s%d, namespace: evil}, spec: {type: ExternalName, externalName: one.example.com}}", i))
			},
			remove: func(a *fakekube.API, i int) { a.Remove(fakekube.Services, fmt.Sprint("evil/s", i)) },
			most:   7, hosts: 1, others: 1,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, log := fakekube.Start(t), testlog.New(t)
			a.Put(fakekube.Definitions, entryDefinition)
			a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
			a.Put(fakekube.Services, svcYAML("data", "db", "10.0.0.2"))
			for i := range test.most + 1 {
				test.put(a, i)
			}
			cfg := onAPI(t, a)
			cfg.Logger = log.Logger()
			r := start(t, cfg)
			r.with = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20))}
			c := openDelta(t, r, node(t, "shop"), nil)
			want := func(hosts int) {
				t.Helper()
				c.next()
				if table := merged(t, c.state()).GetTable(); len(table) != hosts || table["web.shop.svc.cluster.local"] == nil || table["db.data.svc.cluster.local"] == nil {
					t.Fatalf("the table has %d hosts, want web, db and %d others", len(table), hosts-2)
				}
			}
			const message = "the hosts that the namespace shows to other namespaces have"
			logged := func(n int) {
				t.Helper()
				wait.Until(t, "the log names the namespace", func() bool { return log.Count(message, "more than 16384 KiB", "namespace=evil") == n })
			}
			want(2)
			logged(1)
			if errs := r.Errors(); len(errs) != 1 || errs[0].File != "namespace evil" || !strings.Contains(errs[0].Msg, message) {
				t.Errorf("the errors are %v", errs)
			}
			test.remove(a, test.most)
			want(2 + test.others + test.most*test.hosts)
			if errs := r.Errors(); len(errs) != 0 {
				t.Errorf("the errors are %v", errs)
			}
			test.put(a, test.most)
			want(2)
			logged(2)
			a.Put(fakekube.Services, svcYAML("shop", "more", "10.0.0.3"))
			want(3)
		})
	}
}

// D64: a wildcard does not fill the tables with the aliases of other namespaces.
func TestAliasesOfLargeHost(t *testing.T) {
	t.Parallel()
	const aliases = 20
	a, log := fakekube.Start(t), testlog.New(t)
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	for i := range aliases {
		a.Put(fakekube.Services, fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {name: s%[1]d, namespace: shop}, spec: {type: ExternalName, externalName: s%[1]d.example.com}}", i))
	}
	put := func(i int) {
		a.Put(fakekube.ServiceEntries, fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e%d, namespace: evil}, "+
			"spec: {hosts: ['*.example.com'], resolution: NONE, addresses: [%s]}}", i, list(100, "'2001:db8::%[2]x:%[1]x'", i)))
	}
	put(0)
	cfg := onAPI(t, a)
	cfg.Logger = log.Logger()
	r := start(t, cfg)
	c := openDelta(t, r, node(t, "data"), nil)
	want := func(aliased bool) {
		t.Helper()
		c.next()
		table := merged(t, c.state()).GetTable()
		hosts := 2
		if aliased {
			hosts += aliases
		}
		if len(table) != hosts || table["web.shop.svc.cluster.local"] == nil || table["*.example.com"] == nil {
			t.Fatalf("the table has %d hosts, want %d", len(table), hosts)
		}
	}
	want(true)
	put(1)
	want(false)
	wait.Until(t, "the log names the aliases", func() bool {
		return log.Count("a Service of type ExternalName has no addresses, because ServiceEntries of other namespaces", "shop.svc.cluster.local") == aliases
	})
	a.Remove(fakekube.ServiceEntries, "evil/e1")
	want(true)
}

// D64: the log says that agents refuse a table, and why it is so long.
func TestPushThatAgentsRefuse(t *testing.T) {
	t.Parallel()
	a, log := fakekube.Start(t), testlog.New(t)
	a.Put(fakekube.Definitions, entryDefinition)
	a.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
	for e := range 10 {
		a.Put(fakekube.ServiceEntries, fmt.Sprintf("{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: e%d, namespace: evil}, "+
			"spec: {hosts: [one.example.com], resolution: NONE, addresses: [%s]}}", e, list(9000, "'2001:db8:1111:2222:3333:4444:1%03[2]d:%04[1]d'", e)))
	}
	for i := range 20 {
		a.Put(fakekube.Services, fmt.Sprintf("{apiVersion: v1, kind: Service, metadata: {name: s%d, namespace: evil}, spec: {type: ExternalName, externalName: one.example.com}}", i))
	}
	cfg := onAPI(t, a)
	cfg.Logger = log.Logger()
	r := start(t, cfg)
	for _, variant := range []string{variantSotw, variantDelta} {
		if err := open(t, variant, r, node(t, "evil")).err(); status.Code(err) != codes.ResourceExhausted {
			t.Errorf("the stream ended with %v", err)
		}
	}
	wait.Until(t, "pushes are counted", func() bool { return r.metric(t, "long_pushes_total") == 2 })
	if log.Count("a push is longer than 64 MiB", "namespace=evil", `largest_namespaces="[evil (`, "shop (0 KiB)]") != 1 {
		t.Errorf("the log is\n%s", log)
	}
	openDelta(t, r, node(t, "shop"), nil).next()
}
