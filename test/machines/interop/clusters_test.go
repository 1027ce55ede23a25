package interop

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
	"github.com/nametap/nametap/test/machines/lab/load"
)

// The addresses of the own cluster and of another one on the network that connects them.
const (
	ownOnLink  = "172.29.0.1"
	eastOnLink = "172.29.0.2"
)

// reader has the rights that nametap-discovery needs in another cluster, a part of the rights of
// Istio's ClusterRole istio-reader, and a service account with them.
const reader = `apiVersion: v1
kind: Namespace
metadata: {name: istio-system, labels: {topology.istio.io/network: net1}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reader}
rules:
- {apiGroups: [""], resources: [services, namespaces], verbs: [list, watch]}
- {apiGroups: [discovery.k8s.io], resources: [endpointslices], verbs: [list, watch]}
- {apiGroups: [multicluster.x-k8s.io], resources: [serviceimports], verbs: [list, watch]}
- {apiGroups: [authentication.k8s.io], resources: [tokenreviews], verbs: [create]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}
subjects: [{kind: Group, name: "system:serviceaccounts:istio-system", apiGroup: rbac.authorization.k8s.io}]
`

// importDefinition is the custom resource definition of ServiceImports.
const importDefinition = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: serviceimports.multicluster.x-k8s.io, annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/mcs-api"}}
spec:
  group: multicluster.x-k8s.io
  scope: Namespaced
  names: {plural: serviceimports, singular: serviceimport, kind: ServiceImport}
  versions:
  - {name: v1beta1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
  - {name: v1alpha1, served: true, storage: false, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

// otherCluster starts another cluster, without controllers, whose API server this one reaches.
func otherCluster(c *lab.Cluster) *lab.Cluster {
	c.TB.Helper()
	east := lab.NewCluster(c.TB)
	netns.Connect(netns.End{NS: c.NS, Name: "east", Addrs: []string{ownOnLink + "/24"}}, netns.End{NS: east.NS, Name: "own", Addrs: []string{eastOnLink + "/24"}})
	east.StartEtcd()
	east.StartAPIServer("--bind-address=0.0.0.0")
	east.Apply(reader)
	return east
}

// connect makes a service account in the cluster east, and the Secret with a kubeconfig that has its token, in the form of
// istioctl.
func connect(c, east *lab.Cluster, name string) {
	c.TB.Helper()
	east.Apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: " + name + ", namespace: istio-system}\n")
	encode := func(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
	kubeconfig := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: east
  cluster: {certificate-authority-data: %s, server: "https://%s:6443", tls-server-name: kubernetes.default.svc}
contexts:
- name: east
  context: {cluster: east, user: east}
current-context: east
preferences: {}
users:
- name: east
  user: {token: %s}
`, encode(east.Read("certs/apiserver.crt")), eastOnLink, token(east, "istio-system", name))
	c.Apply("apiVersion: v1\nkind: Secret\nmetadata: {name: istio-remote-secret-east, namespace: istio-system, labels: {istio/multiCluster: 'true'}, " +
		"annotations: {networking.istio.io/cluster: east}}\ndata: {east: " + encode(kubeconfig) + "}\n")
}

// clusterObjects are Services of a cluster whose addresses have this number.
func clusterObjects(n int) string {
	return strings.ReplaceAll(`apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.$n.1, ports: [{name: http, port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: only-$n, namespace: shop}
spec: {clusterIP: 10.96.$n.2, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, ports: [{name: sql, port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-$n, namespace: shop, labels: {kubernetes.io/service-name: db, service.kubernetes.io/headless: ""}}
addressType: IPv4
endpoints:
- {addresses: [10.24$n.0.1], hostname: db-0}
- {addresses: [10.24$n.0.2]}
ports: [{name: sql, port: 5432}]
`, "$n", strconv.Itoa(n))
}

// importObjects is a ServiceImport with an address and a headless one, in a version.
func importObjects(version string) string {
	return fmt.Sprintf(`apiVersion: multicluster.x-k8s.io/%[1]s
kind: ServiceImport
metadata: {name: web, namespace: shop}
spec: {type: ClusterSetIP, ips: [10.96.112.1], ports: [{name: http, port: 80, protocol: TCP}]}
---
apiVersion: multicluster.x-k8s.io/%[1]s
kind: ServiceImport
metadata: {name: db, namespace: shop}
spec: {type: Headless, ports: [{name: sql, port: 5432, protocol: TCP}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: imported-db-c1
  namespace: shop
  labels:
    endpointslice.kubernetes.io/managed-by: mcs
    multicluster.kubernetes.io/service-name: db
    multicluster.kubernetes.io/source-cluster: c1
addressType: IPv4
endpoints: [{addresses: [10.249.0.1], hostname: db-0}, {addresses: [10.249.0.2]}]
ports: [{name: sql, port: 5432}]
`, version)
}

const (
	webHost     = "web.shop.svc.cluster.local"
	dbHost      = "db.shop.svc.cluster.local"
	webOfSet    = "web.shop.svc.clusterset.local"
	dbOfSet     = "db.shop.svc.clusterset.local"
	podOfSet    = "db-0.c1." + dbOfSet
	dashedOfSet = "10-249-0-2.c1." + dbOfSet
)

// TestClusters runs nametap-discovery with two real API servers. Agents of both clusters get the
// addresses of their own one, while Secrets and credentials change, and while the API server of the
// other cluster is away.
func TestClusters(t *testing.T) { // D23, D24, D25, D26, D27, D28, D29
	c := newCluster(t, clusterObjects(1))
	c.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system, labels: {topology.istio.io/network: net1}}\n")
	east := otherCluster(c)
	east.Apply(clusterObjects(2))
	connect(c, east, "reader")
	flags := []string{"--clusters-namespace", "istio-system", "--cluster-id", "own"}
	d := discovery(c, flags...)
	own, far := newHost(c, onlyIPv4), newHost(c, onlyIPv4)
	a := own.agent("own", "shop", append(own.plain(discoveryPort), "--cluster-id", "own")...)
	b := far.agent("east", "shop", append(far.plain(discoveryPort), "--cluster-id", "east")...)
	own.answers(map[string]string{
		webHost + " A": "10.96.1.1", "only-1.shop A": "10.96.1.2", "only-2.shop A": "10.96.2.2", "web SRV": "80:web.shop.svc.cluster.local.",
		dbHost + " A": "10.241.0.1 10.241.0.2 10.242.0.1 10.242.0.2", "db-0." + dbHost + " A": "10.241.0.1", "10-242-0-2." + dbHost + " A": "10.242.0.2",
	})
	far.answers(map[string]string{
		webHost + " A": "10.96.2.1", "only-1.shop A": "10.96.1.2", "only-2.shop A": "10.96.2.2",
		dbHost + " A": "10.241.0.1 10.241.0.2 10.242.0.1 10.242.0.2", "db-0." + dbHost + " A": "10.242.0.1",
	})
	loads := []*load.Load{own.startLoad(expectation(a.Table())), far.startLoad(expectation(b.Table()))}
	changed := 0
	// wantChange checks that both agents follow the cluster east.
	wantChange := func(t *testing.T) {
		t.Helper()
		changed++
		name, ip := fmt.Sprintf("new-%d", changed), fmt.Sprintf("10.96.2.%d", 100+changed)
		east.Apply(service(name, ip))
		for _, h := range []*host{own, far} {
			h.answers(map[string]string{name + ".shop A": ip})
		}
		for _, l := range loads {
			wantGood(t, l)
		}
	}
	t.Run("a change", wantChange)
	t.Run("new credentials", func(t *testing.T) {
		connect(c, east, "second")
		wait.Until(t, "they are in use", func() bool { return d.Logged("reading a cluster", "cluster=east") == 2 })
		east.Remove("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: reader, namespace: istio-system}\n")
		wantChange(t)
	})
	t.Run("the API server is away", func(t *testing.T) {
		east.APIServer.End(syscall.SIGKILL)
		c.Apply(service("meanwhile", "10.96.1.99"))
		own.answers(map[string]string{"meanwhile.shop A": "10.96.1.99", "only-2.shop A": "10.96.2.2"})
		east.StartAPIServer("--bind-address=0.0.0.0")
		wantChange(t)
	})
	t.Run("ServiceImports", func(*testing.T) {
		c.Apply(importDefinition)
		c.Apply(importObjects("v1alpha1"))
		want := map[string]string{
			webOfSet + " A": "10.96.112.1", webOfSet + " SRV": "80:" + webOfSet + ".", dbOfSet + " A": "10.249.0.1 10.249.0.2",
			podOfSet + " A": "10.249.0.1", dashedOfSet + " A": "10.249.0.2", "_sql._tcp." + dbOfSet + " SRV": "5432:" + dashedOfSet + ". 5432:" + podOfSet + ".",
			webHost + " A": "10.96.1.1",
		}
		own.answers(want)
		want[webHost+" A"] = "10.96.2.1"
		far.answers(want)
		c.Apply(strings.Replace(importObjects("v1beta1"), "10.96.112.1", "10.96.112.2", 1))
		own.answers(map[string]string{webOfSet + " A": "10.96.112.2"})
	})
	for _, l := range loads {
		wantGood(t, l)
		l.Stop()
	}
	t.Run("a start while the API server is away", func(t *testing.T) {
		east.APIServer.End(syscall.SIGKILL)
		d.End(syscall.SIGTERM)
		began := time.Now()
		d = discovery(c, flags...)
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("ready %v after the start, want at most 30 s", took)
		}
		own.answers(map[string]string{"only-2.shop A": "NXDOMAIN"})
		far.answers(map[string]string{webHost + " A": "10.96.2.1", "only-2.shop A": "10.96.2.2"}) // it keeps its table
		east.StartAPIServer("--bind-address=0.0.0.0")
		own.answers(map[string]string{"only-2.shop A": "10.96.2.2"})
	})
	t.Run("the Secret is deleted", func(t *testing.T) {
		c.Remove("apiVersion: v1\nkind: Secret\nmetadata: {name: istio-remote-secret-east, namespace: istio-system}\n")
		own.answers(map[string]string{"only-2.shop A": "NXDOMAIN", dbHost + " A": "10.241.0.1 10.241.0.2", webHost + " A": "10.96.1.1"})
		if d.Logged("no Secret names the cluster any more", "cluster=east") == 0 {
			t.Error("the log does not say that the cluster is removed")
		}
	})
}
