package node

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/nametap/nametap/test/machines/peers"
)

// serviceEntry is the mesh name that istiod knows, the same as in the manifest with
// nametap-discovery.
const serviceEntry = `
apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: db, namespace: default}
spec:
  hosts: [db.example.com]
  addresses: [192.0.2.53]
  ports: [{number: 3306, name: tcp, protocol: TCP}]
  resolution: DNS
`

// startIstiod starts an unmodified istiod beside the pods, behind its Service.
func (c *cluster) startIstiod() {
	c.t.Helper()
	binary := peers.Build(c.t, "istiod")
	c.apply(c.t, peers.File(c.t, "istiod", "istio.io/istio", "manifests/charts/base/files/crd-all.gen.yaml"))
	c.apply(c.t, "apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system}\n")
	c.apply(c.t, strings.ReplaceAll(`
apiVersion: v1
kind: Service
metadata: {name: istiod, namespace: istio-system}
spec:
  ports: [{name: grpc-xds, port: 15010}, {name: https-dns, port: 15012}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: istiod, namespace: istio-system, labels: {kubernetes.io/service-name: istiod}}
addressType: IPv4
ports: [{name: grpc-xds, port: 15010}, {name: https-dns, port: 15012}]
endpoints: [{addresses: [$NODE_IP], conditions: {ready: true}}]
`, "$NODE_IP", nodeIP))
	c.apply(c.t, serviceEntry)
	c.istiod = c.start("istiod", "env", "POD_NAME=istiod", "POD_NAMESPACE=istio-system", "CLUSTER_ID=Kubernetes",
		binary, "discovery", "--registries=Kubernetes", "--kubeconfig="+c.path("kubeconfig"), "--meshConfig="+c.path("mesh.yaml"),
		"--networksConfig=/nonexistent", "--ctrlz_address=127.0.0.1", "--httpAddr=127.0.0.1:15080", "--monitoringAddr=127.0.0.1:15014")
	c.istiod.await(c.istiodReady)
}

// istiodReady returns an error until istiod serves.
func (c *cluster) istiodReady() error {
	response, err := c.api.client.Get("http://127.0.0.1:15080/ready")
	if err != nil {
		return err
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("istiod: %s", response.Status)
	}
	return nil
}
