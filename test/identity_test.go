package test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/netns"
)

// C1: an agent that starts before the network is up sends the control plane the addresses
// that the host gets later, of each family, and the remaining ones after one is removed.
func TestAddressesOfTheMoment(t *testing.T) {
	t.Parallel()
	netns.Need(t, "ip")
	h := newBareHost(t)
	far := netns.New(t)
	a := h.start("--instance-ip", "", "--capture=false")
	h.wantNode(1, "127.0.0.1")

	netns.Connect(
		netns.End{NS: h.NS, Name: "eth0", Addrs: []string{"10.0.0.1/24"}},
		netns.End{NS: far, Name: "eth0", Addrs: []string{"10.0.0.2/24"}},
	)
	h.wantNode(2, "10.0.0.1")
	h.Exec("ip", "address", "add", "fd00::1/64", "dev", "eth0", "nodad")
	h.wantNode(3, "10.0.0.1,fd00::1")
	h.Exec("ip", "address", "del", "10.0.0.1/24", "dev", "eth0")
	h.wantNode(4, "fd00::1")
	if n := a.log.Count("level=WARN"); n != 0 && !stoodStill(t) {
		t.Errorf("%d warnings", n)
	}
}

// wantNode waits for a stream of at least this number whose node has the addresses.
func (h *host) wantNode(stream int, addresses string) {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(h.tb.Context(), patience)
	defer cancel()
	_, err := h.xds.Wait(ctx, func(r fakexds.Request) bool {
		return r.Stream >= stream && r.Node().GetMetadata().GetFields()["INSTANCE_IPS"].GetStringValue() == addresses
	})
	if err != nil {
		h.tb.Fatalf("no stream %d or later of a node with %s: %v", stream, addresses, err)
	}
}

// The files that `istioctl x workload entry configure` wrote for a VM, with another address
// of istiod in mesh.yaml.
const (
	clusterEnv = `CANONICAL_REVISION=latest
CANONICAL_SERVICE=vm-app
ISTIO_INBOUND_PORTS='*'
ISTIO_LOCAL_EXCLUDE_PORTS=22,15090,15021,15020
ISTIO_METAJSON_LABELS='{"app":"vm-app","service.istio.io/canonical-name":"vm-app","service.istio.io/canonical-revision":"latest"}'
ISTIO_META_CLUSTER_ID=west
ISTIO_META_DNS_CAPTURE=true
ISTIO_META_MESH_ID=''
ISTIO_META_NETWORK=vm-net
ISTIO_META_WORKLOAD_NAME=vm-app
ISTIO_NAMESPACE=shop
ISTIO_SERVICE=vm-app.shop
ISTIO_SERVICE_CIDR='*'
ISTIO_SVC_IP=192.0.2.7
POD_NAMESPACE=shop
SERVICE_ACCOUNT=vm-sa
TRUST_DOMAIN=mesh.example
`
	meshYAML = `defaultConfig:
  discoveryAddress: %s
  proxyMetadata:
    CANONICAL_REVISION: latest
    CANONICAL_SERVICE: vm-app
    ISTIO_META_AUTO_REGISTER_GROUP: vm-app
    ISTIO_META_CLUSTER_ID: west
    ISTIO_META_DNS_CAPTURE: "true"
    ISTIO_META_MESH_ID: ""
    ISTIO_META_NETWORK: vm-net
    ISTIO_METAJSON_LABELS: '{"app":"vm-app","service.istio.io/canonical-name":"vm-app","service.istio.io/canonical-revision":"latest"}'
    POD_NAMESPACE: shop
    SERVICE_ACCOUNT: vm-sa
    TRUST_DOMAIN: mesh.example
  tracing:
    zipkin:
      address: zipkin.istio-system:9411
`
)

// C1: istioctl's files for a VM work unchanged: the agent sends the same node as Istio's
// agent, and exchanges the token for a certificate of the VM's identity.
func TestIstioVMFiles(t *testing.T) {
	t.Parallel()
	const identity = "spiffe://mesh.example/ns/shop/sa/vm-sa"
	h := newBareHost(t)
	authority := fakexds.NewAuthority(t, "istiod.istio-system.svc", identity)
	h.Run(func() { h.xds = fakexds.Start(t, fakexds.Options{Authority: authority, Token: "token"}) })
	cmd := exec.Command(binary(t), "agent", "--dns-addr", dnsAddr, "--status-addr", statusAddr, "--resolv-conf", h.resolvConf,
		"--drain", "10ms", "--state-dir", t.TempDir(), "--log-level", "debug",
		"--mesh-config", h.write("mesh.yaml", fmt.Sprintf(meshYAML, h.xds.Addr())),
		"--xds-root-ca", h.write("root-cert.pem", authority.Root()), "--xds-token-file", h.write("istio-token", "token"))
	cmd.Env = append(os.Environ(), unquoted(clusterEnv)...)
	a := h.launchCommand(cmd)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := h.xds.WaitStream(ctx, 1)
	if err != nil {
		t.Fatal(err)
	}
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	name, _, _ = strings.Cut(name, ".")
	if want := "sidecar~192.0.2.7~" + name + ".shop~shop.svc.cluster.local"; r.Node().GetId() != want {
		t.Errorf("id %q, want %q", r.Node().GetId(), want)
	}
	fields := r.Node().GetMetadata().GetFields()
	for key, want := range map[string]string{
		"NETWORK": "vm-net", "WORKLOAD_NAME": "vm-app", "AUTO_REGISTER_GROUP": "vm-app", "NAMESPACE": "shop", "SERVICE_ACCOUNT": "vm-sa", "CLUSTER_ID": "west",
	} {
		if got := fields[key].GetStringValue(); got != want {
			t.Errorf("metadata %s is %q, want %q", key, got, want)
		}
	}
	for key, want := range map[string]string{
		"app": "vm-app", "service.istio.io/canonical-name": "vm-app", "service.istio.io/canonical-revision": "latest",
	} {
		if got := fields["LABELS"].GetStructValue().GetFields()[key].GetStringValue(); got != want {
			t.Errorf("label %s is %q, want %q", key, got, want)
		}
	}
	if got := r.Header.Get("clusterid"); !slices.Equal(got, []string{"west"}) {
		t.Errorf("clusterid is %q", got)
	}
	signing, err := authority.WaitSigned(ctx, 1)
	if err != nil || signing.Asked != identity {
		t.Errorf("%+v, %v", signing, err)
	}
	a.end(terminate)
}

// unquoted returns the variables of a file in the format of shells and systemd.
func unquoted(text string) []string {
	var variables []string
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		variables = append(variables, key+"="+strings.Trim(value, "'"))
	}
	return variables
}

// C1: the labels of a pod come from the file of the downward API, and the agent sends
// changes of the file.
func TestPodLabels(t *testing.T) {
	t.Parallel()
	h := newBareHost(t)
	file := h.write("labels", "app=\"web\"\npod-template-hash=\"5d8\"\n")
	h.environment = []string{`ISTIO_METAJSON_LABELS={"app":"static","tier":"front"}`}
	h.start("--labels-file", file)
	h.wantLabels(map[string]any{"app": "web", "tier": "front"})
	h.write("labels.new", "app=\"web\"\nversion=\"a \\\"quoted\\\" one\"\n")
	if err := os.Rename(filepath.Join(h.dir, "labels.new"), file); err != nil {
		t.Fatal(err)
	}
	h.wantLabels(map[string]any{"app": "web", "tier": "front", "version": `a "quoted" one`})
}

// wantLabels waits for a stream of a node with the labels.
func (h *host) wantLabels(labels map[string]any) {
	h.tb.Helper()
	ctx, cancel := context.WithTimeout(h.tb.Context(), patience)
	defer cancel()
	if _, err := h.xds.Wait(ctx, func(r fakexds.Request) bool {
		return maps.Equal(r.Node().GetMetadata().GetFields()["LABELS"].GetStructValue().AsMap(), labels)
	}); err != nil {
		h.tb.Fatalf("no node with the labels %v: %v", labels, err)
	}
}
