package discovery

import (
	"encoding/base64"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/testlog"
)

// fleet is the own cluster, whose name is "mine", and others.
type fleet struct {
	t      *testing.T
	own    *fakekube.API
	others map[string]*fakekube.API
	log    *testlog.Buffer
	cfg    Config
}

// newFleet returns API servers without objects but, for each other cluster, a Secret of the same name.
func newFleet(t *testing.T, others ...string) *fleet {
	t.Helper()
	f := &fleet{t: t, own: fakekube.Start(t), others: map[string]*fakekube.API{}, log: testlog.New(t)}
	for _, name := range others {
		f.others[name] = fakekube.Start(t)
		f.put(name, 1, "{}")
	}
	f.cfg = onAPI(t, f.own)
	f.cfg.ClustersNamespace, f.cfg.ClusterID, f.cfg.Logger = "istio-system", "mine", f.log.Logger()
	return f
}

// put puts the Secret of a cluster, which is some minutes old. user is as in fakekube's KubeconfigWith.
func (f *fleet) put(cluster string, minutes int, user string) {
	f.own.Put(fakekube.Secrets, secretYAML(cluster, minutes, map[string]string{cluster: f.others[cluster].KubeconfigWith(user)}))
}

// secretYAML returns a Secret with texts of kubeconfigs, by cluster.
func secretYAML(name string, minutes int, kubeconfigs map[string]string) string {
	var data []string
	for _, cluster := range slices.Sorted(maps.Keys(kubeconfigs)) {
		data = append(data, fmt.Sprintf("%q: %s", cluster, base64.StdEncoding.EncodeToString([]byte(kubeconfigs[cluster]))))
	}
	created := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC).Add(-time.Duration(minutes) * time.Minute)
	return fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: %s, namespace: istio-system, labels: {istio/multiCluster: 'true'}, creationTimestamp: %q}\ndata: {%s}\n",
		name, created.Format(time.RFC3339), strings.Join(data, ", "))
}

// rootYAML returns the root namespace of a cluster in a network.
func rootYAML(network string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system, labels: {topology.istio.io/network: %s}}\n", network)
}

// putHeadless puts the headless Service db with an endpoint db-0.
func putHeadless(a *fakekube.API, ip string) {
	a.Put(fakekube.Services, "apiVersion: v1\nkind: Service\nmetadata: {name: db, namespace: shop}\nspec: {clusterIP: None}\n")
	a.Put(fakekube.EndpointSlices, sliceYAML(ip, true))
}

// A member is a client of a cluster.
type member struct {
	client
	t *testing.T
}

// join opens a stream of a client of a cluster, and receives its first table.
func (f *fleet) join(r running, variant, cluster string) member {
	f.t.Helper()
	m := member{open(f.t, variant, r, node(f.t, "shop", "CLUSTER_ID", cluster)), f.t}
	m.next()
	return m
}

// hosts returns the addresses of the hosts, without the domain of Services.
func (m member) hosts() map[string]string {
	out := map[string]string{}
	for host, info := range merged(m.t, m.state()).GetTable() {
		out[strings.TrimSuffix(host, ".shop.svc.cluster.local")] = strings.Join(info.GetIps(), " ")
	}
	return out
}

// want receives tables until the client has these hosts. Each table must have the hosts in
// always.
func (m member) want(hosts map[string]string, always ...string) {
	m.t.Helper()
	for {
		got := m.hosts()
		for _, host := range always {
			if got[host] == "" {
				m.t.Errorf("%s is missing: %v", host, got)
			}
		}
		if maps.Equal(got, hosts) {
			return
		}
		m.expect(cmp.Diff(got, hosts))
		m.next()
	}
}
