package interop

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// restored are the objects of a backup.
const restored = `apiVersion: v1
kind: Namespace
metadata: {name: istio-system}
---
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Service
metadata: {name: removed, namespace: shop}
spec: {clusterIP: 10.96.2.1, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ""}}
addressType: IPv4
endpoints: [{addresses: [10.244.2.1]}]
ports: []
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api, namespace: shop}
spec: {hosts: [api.example.com], addresses: [198.51.100.21], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}
`

// Objects removed and changed after the backup.
const (
	afterBackupRemoved = `apiVersion: v1
kind: Service
metadata: {name: removed, namespace: shop}
`
	afterBackupChanged = `apiVersion: v1
kind: Service
metadata: {name: added, namespace: shop}
spec: {clusterIP: 10.96.2.2, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ""}}
addressType: IPv4
endpoints: [{addresses: [10.244.2.2]}]
ports: []
---
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api, namespace: shop}
spec: {hosts: [api.example.com], addresses: [198.51.100.22], resolution: NONE, ports: [{number: 80, name: http, protocol: HTTP}]}
`
)

// A backup of etcd, and what an agent has of its objects.
type backup struct {
	c        *cluster
	etcd     *daemon
	path     string
	table    table
	restores int
}

// etcdctl runs a command of etcd's own tools.
func (c *cluster) etcdctl(args ...string) {
	c.tb.Helper()
	c.Exec(c.kubernetes, args...)
}

// restore ends the API server and etcd, and starts both with the backup. It calls meanwhile before the API server starts.
func (b *backup) restore(meanwhile func(), flags ...string) {
	b.c.tb.Helper()
	b.c.apiserver.end(syscall.SIGKILL)
	b.etcd.end(syscall.SIGKILL)
	b.restores++
	dir := b.c.path("etcd-" + strconv.Itoa(b.restores))
	b.c.etcdctl(append([]string{"snapshot", "restore", b.path, "--data-dir", dir}, flags...)...)
	b.etcd = b.c.etcdIn(dir)
	meanwhile()
	b.c.startAPIServer()
}

// version returns the version of the API server's newest state.
func (c *cluster) version() int {
	c.tb.Helper()
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	c.get("/api/v1/namespaces/shop/configmaps", &list)
	version, err := strconv.Atoi(list.Metadata.ResourceVersion)
	if err != nil {
		c.tb.Fatal(err)
	}
	return version
}

// TestEtcdRestore checks that agents have what etcd has 5 s after it was restored from a backup and
// the API server started again. That includes an agent that was not connected meanwhile, if the API
// server's versions have grown as far as before the restore, and if the restore has raised them.
func TestEtcdRestore(t *testing.T) { // D60, D38
	c := prepareCluster(t)
	b := &backup{c: c, etcd: c.startEtcd(), path: c.path("backup.db")}
	c.startAPIServer()
	definitions := istioDefinitions(t)
	c.apply(definitions)
	c.apply(restored)
	d := c.discovery()
	m, away := c.machine(onlyIPv4), c.machine(onlyIPv4)
	a := m.agent(pod{"connected", "shop"}, m.discoveryFlags()...)
	b.table = a.table()
	c.etcdctl("etcdctl", "--endpoints", "http://127.0.0.1:2379", "snapshot", "save", b.path)

	for _, tc := range []struct {
		name    string
		restore func()
	}{
		{"versions go back", func() { b.restore(func() {}) }},
		{"versions are reached before the replica connects again", func() {
			before := c.version()
			d.process.signal(syscall.SIGSTOP)
			defer d.process.signal(syscall.SIGCONT)
			b.restore(func() {})
			if now := c.version(); now >= before {
				t.Fatalf("the version is %d, and was %d before the restore", now, before)
			}
			for i := 0; c.version() <= before; i++ {
				c.apply(fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: other, namespace: shop}\ndata: {number: '%d'}\n", i))
			}
		}},
		{"versions are raised", func() { b.restore(func() {}, "--bump-revision", "1000000", "--mark-compacted") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			state := away.path("state-" + strconv.Itoa(b.restores))
			flags := append(away.discoveryFlags(), "--state-dir", state)
			leaves := away.agent(pod{"away", "shop"}, flags...)
			c.remove(afterBackupRemoved)
			c.apply(afterBackupChanged)
			for _, one := range []*agent{a, leaves} {
				wait.Until(t, "an agent has the changes", func() bool { return changed(one.table()) })
			}
			leaves.end(terminate)
			tc.restore()
			ready := time.Now()
			wait.Until(t, "the agent has the table of the backup", func() bool { return b.table.diff(a.table()) == "" })
			took := time.Since(ready)
			t.Logf("the agent has the table of the backup %v after the API server is ready", took.Round(time.Millisecond))
			if took > catchUp {
				t.Errorf("that took more than %v", catchUp)
			}
			ahead := d.metric("http://"+discoveryStatus+"/metrics", "nametap_discovery_clients_ahead_total")
			back := away.launch(pod{"away", "shop"}, flags...)
			began := time.Now()
			wait.Until(t, "the agent that was away has the table of the backup", func() bool {
				return back.logged("msg=ready") > 0 && b.table.diff(back.table()) == ""
			})
			t.Logf("the agent that was away has it %v after its start; %v clients were ahead", time.Since(began).Round(time.Millisecond),
				d.metric("http://"+discoveryStatus+"/metrics", "nametap_discovery_clients_ahead_total")-ahead)
			back.end(terminate)
		})
	}
	if n := d.process.logged("sends nothing"); n > 0 {
		t.Errorf("%d watches were silent", n)
	}
}

// changed reports whether a table has all changes after the backup.
func changed(t table) bool {
	_, removed := t["removed.shop.svc.cluster.local"]
	address := func(host string) string { return strings.Join(t[host].IPs, " ") }
	return !removed && address("added.shop.svc.cluster.local") == "10.96.2.2" && address("db.shop.svc.cluster.local") == "10.244.2.2" &&
		address("api.example.com") == "198.51.100.22"
}
