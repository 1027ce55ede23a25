package interop

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// The files that `istioctl x workload entry configure --autoregister` writes for a VM, with an
// address of istiod that needs no /etc/hosts.
const (
	clusterEnv = `CANONICAL_REVISION='latest'
CANONICAL_SERVICE='vm-app'
CA_ADDR='%[1]s'
ISTIO_INBOUND_PORTS='*'
ISTIO_LOCAL_EXCLUDE_PORTS='22,15090,15021,15020'
ISTIO_METAJSON_LABELS='{"app":"vm-app","service.istio.io/canonical-name":"vm-app","service.istio.io/canonical-revision":"latest"}'
ISTIO_META_AUTO_REGISTER_GROUP='vm-app'
ISTIO_META_CLUSTER_ID='Kubernetes'
ISTIO_META_DNS_CAPTURE='true'
ISTIO_META_MESH_ID=''
ISTIO_META_NETWORK=''
ISTIO_META_WORKLOAD_NAME='vm-app'
ISTIO_NAMESPACE='shop'
ISTIO_SERVICE='vm-app.shop'
ISTIO_SERVICE_CIDR='*'
ISTIO_SVC_IP='%[2]s'
POD_NAMESPACE='shop'
SERVICE_ACCOUNT='default'
TRUST_DOMAIN=''
`
	vmMesh = `defaultConfig:
  discoveryAddress: %[1]s
  proxyMetadata:
    CANONICAL_REVISION: latest
    CANONICAL_SERVICE: vm-app
    ISTIO_META_AUTO_REGISTER_GROUP: vm-app
    ISTIO_META_CLUSTER_ID: Kubernetes
    ISTIO_META_DNS_CAPTURE: "true"
    ISTIO_META_MESH_ID: ""
    ISTIO_META_NETWORK: ""
    ISTIO_META_WORKLOAD_NAME: vm-app
    ISTIO_METAJSON_LABELS: '{"app":"vm-app","service.istio.io/canonical-name":"vm-app","service.istio.io/canonical-revision":"latest"}'
    POD_NAMESPACE: shop
    SERVICE_ACCOUNT: default
    TRUST_DOMAIN: ""
  tracing:
    zipkin:
      address: zipkin.istio-system:9411
`
	workloadGroup = `apiVersion: networking.istio.io/v1
kind: WorkloadGroup
metadata: {name: vm-app, namespace: shop}
spec:
  metadata: {labels: {app: vm-app}}
  template: {serviceAccount: default}
`
)

// C1: with the files that istioctl writes for a VM, istiod issues the VM's certificate, registers
// the VM as a workload of its group with its address, and sends its table.
func TestVMFiles(t *testing.T) {
	d := start(t, options{})
	d.apply(workloadGroup)
	m := d.machine(onlyIPv4)
	address := m.address(d.port(15012))
	mesh := m.write("mesh.yaml", fmt.Sprintf(vmMesh, address))
	cmd := exec.Command(binary, "agent", "--dns-addr", dnsAddr, "--status-addr", statusAddr, "--resolv-conf", m.resolvConf("shop"),
		"--drain", "0s", "--state-dir", m.path("state"), "--mesh-config", mesh,
		"--xds-root-ca", m.write("root-cert.pem", d.root("shop")), "--xds-token-file", m.write("istio-token", d.token("shop", audience)))
	cmd.Env = append(os.Environ(), m.runtime())
	for line := range strings.Lines(fmt.Sprintf(clusterEnv, address, m.addrs[0])) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		cmd.Env = append(cmd.Env, key+"="+strings.Trim(value, "'"))
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	host, _, _ = strings.Cut(host, ".")
	a := &agent{daemon: m.run("vm", cmd), m: m, pod: pod{host, "shop"}}
	a.await("the agent has a certificate and a table", func() bool {
		return a.logged("msg=ready") > 0 && a.logged("workload certificate obtained", "spiffe://cluster.local/ns/shop/sa/default") > 0
	})
	path := "/apis/networking.istio.io/v1/namespaces/shop/workloadentries/vm-app-" + m.addrs[0]
	a.await("istiod has registered the VM", func() bool {
		status, _ := d.try(http.MethodGet, path, "", nil)
		return status == http.StatusOK
	})
	d.wantTable(a)
}
