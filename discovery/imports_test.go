package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakekube"
	"github.com/nametap/nametap/internal/testkit/wait"
)

const importDefinition = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: serviceimports.multicluster.x-k8s.io}\n"

// importYAML returns a ServiceImport.
func importYAML(version, name, spec string) string {
	return fmt.Sprintf("apiVersion: multicluster.x-k8s.io/%s\nkind: ServiceImport\nmetadata: {name: %s, namespace: shop}\nspec: {%s}\n", version, name, spec)
}

// importedSliceYAML returns a slice of a ServiceImport with the endpoint db-0 of a cluster, as
// controllers of the Multi-Cluster Services API make it.
func importedSliceYAML(cluster, ip string) string {
	return fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\naddressType: IPv4\n"+
		"metadata: {name: imported-db-%[1]s, namespace: shop, labels: {endpointslice.kubernetes.io/managed-by: mcs, "+
		"multicluster.kubernetes.io/service-name: db, multicluster.kubernetes.io/source-cluster: %[1]s}}\n"+
		"ports: [{name: sql, port: 5432}]\nendpoints: [{addresses: [%[2]s], hostname: db-0}]\n", cluster, ip)
}

// TestServiceImports checks that ServiceImports of both versions have their hosts, even if their
// definition comes late, and in other clusters.
func TestServiceImports(t *testing.T) { // D14, D26, D27
	t.Parallel()
	for version, path := range map[string]string{"v1alpha1": fakekube.ServiceImports, "v1beta1": fakekube.BetaImports} {
		t.Run(version, func(t *testing.T) {
			f := newFleet(t, "east")
			east := f.others["east"]
			for _, a := range []*fakekube.API{f.own, east} {
				a.SetMultiClusterVersions(fakekube.Version{Name: "v1", Resources: []string{"serviceexports"}}, fakekube.Version{Name: version, Resources: []string{"serviceimports"}})
				a.Put(path, importYAML(version, "db", "type: Headless, ports: [{port: 5432}]"))
				a.Put(fakekube.EndpointSlices, importedSliceYAML("c1", "10.1.0.1"))
			}
			f.own.Put(fakekube.Services, svcYAML("shop", "web", "10.0.0.1"))
			f.own.Put(path, importYAML(version, "web", "type: ClusterSetIP, ips: [10.112.0.1], ports: [{name: http, port: 80, protocol: TCP}]"))
			east.Put(path, importYAML(version, "web", "type: ClusterSetIP, ips: [10.113.0.1]"))
			east.Put(fakekube.Definitions, importDefinition)
			r := start(t, f.cfg)
			mine, theirs := f.join(r, variantDelta, "mine"), f.join(r, variantSotw, "east")
			// Until the own cluster has the definition, the imports of the other one count.
			const web, db, pod = "web.shop.svc.clusterset.local", "db.shop.svc.clusterset.local", "db-0.c1.db.shop.svc.clusterset.local"
			mine.want(map[string]string{"web": "10.0.0.1", web: "10.113.0.1", db: "10.1.0.1", pod: "10.1.0.1"})
			f.own.Put(fakekube.Definitions, importDefinition)
			mine.want(map[string]string{"web": "10.0.0.1", web: "10.112.0.1", db: "10.1.0.1", pod: "10.1.0.1"})
			theirs.want(map[string]string{"web": "10.0.0.1", web: "10.113.0.1", db: "10.1.0.1", pod: "10.1.0.1"})
			f.own.Put(fakekube.EndpointSlices, importedSliceYAML("c2", "10.2.0.1"))
			mine.want(map[string]string{"web": "10.0.0.1", web: "10.112.0.1", db: "10.1.0.1 10.2.0.1", pod: "10.1.0.1", strings.Replace(pod, "c1", "c2", 1): "10.2.0.1"})
			f.own.Put(path, importYAML(version, "web", "type: Neither, ips: [10.112.0.2]"))
			want := `ServiceImport shop/web: spec.type: want ClusterSetIP or Headless, got "Neither"`
			wait.Until(t, "the error is known", func() bool { got := errorsOf(r); return len(got) == 1 && got[0] == want })
			f.own.Remove(path, "shop/web")
			f.own.Remove(path, "shop/db")
			mine.want(map[string]string{"web": "10.0.0.1", web: "10.113.0.1", db: "10.1.0.1", pod: "10.1.0.1"})
		})
	}
}
