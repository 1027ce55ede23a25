package node

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/test/machines/peers"
)

// Addresses of the cluster.
const (
	nodeIP    = "172.30.0.2"
	clusterIP = "10.96.0.10" // of kube-dns
	coreDNS   = nodeIP + ":1053"
	// strangersIP is the address of all names that the mesh does not have. If a mesh name
	// has it, the nameserver answered and not the agent.
	strangersIP = "198.51.100.80"
	adminToken  = "admin"
)

// A cluster is a Kubernetes cluster of one node.
type cluster struct {
	*machine
	api     api
	kubectl []string // the command and its first arguments
	control string   // the binaries of peers
	node    string
	// programs is the directory of nametap and nametap-discovery, outside of the node.
	programs string

	kubelet, istiod *service
}

// newCluster starts a cluster and waits until its node is ready.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	c := &cluster{control: peers.Build(t, "kubernetes"), node: peers.Build(t, "node")}
	layouts, checks := buildImages(t)
	c.programs = buildPrograms(t)
	begun := time.Now()
	c.machine = newMachine(t)
	c.api = newAPI(c.net)
	c.configure(t)
	c.network()
	containerd := c.start("containerd", "env", "TMPDIR=/run", "containerd", "--config", c.path("containerd.toml"))
	c.controlPlane()
	containerd.await(func() error { return c.command(t.Context(), ctr("version")...).Run() })
	c.kubelet = c.start("kubelet", c.node, "kubelet", "--config="+c.path("kubelet.yaml"), "--kubeconfig="+c.path("kubeconfig"),
		"--hostname-override=node", "--node-ip="+nodeIP, "--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki", "--v=2")
	c.start("kube-proxy", c.node, "proxy", "--config="+c.path("proxy.yaml"))
	c.start("coredns", c.node, "coredns", "-conf", c.path("Corefile"))
	c.importImages(t, layouts, checks)
	c.kubelet.await(func() error {
		var node corev1.Node
		if err := c.api.get("/api/v1/nodes/node", &node); err != nil {
			return err
		}
		for _, condition := range node.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("the conditions of the node are %v", node.Status.Conditions)
	})
	t.Logf("the node is ready after %v", time.Since(begun).Round(time.Millisecond))
	return c
}

// path returns the path of a file in the work directory.
func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }

// network gives the node its address, with a default route that ends nowhere.
func (c *cluster) network() {
	c.net.Exec("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node1")
	c.net.Exec("ip", "link", "set", "node0", "up")
	c.net.Exec("ip", "link", "set", "node1", "up")
	c.net.Exec("ip", "address", "add", nodeIP+"/24", "dev", "node0")
	c.net.Exec("ip", "route", "add", "default", "via", "172.30.0.1", "dev", "node0")
}

// controlPlane starts etcd, the API server, the controllers and the scheduler.
func (c *cluster) controlPlane() {
	c.start("etcd", c.control, "etcd", "--data-dir=/var/lib/etcd/data", "--unsafe-no-fsync")
	c.start("apiserver", c.control, "apiserver", "--etcd-servers=http://127.0.0.1:2379", "--cert-dir=/run/apiserver",
		"--advertise-address="+nodeIP, "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC", "--allow-privileged=true",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+c.path("sa.key"),
		"--service-account-signing-key-file="+c.path("sa.key"), "--token-auth-file="+c.path("tokens.csv"),
		"--kubelet-preferred-address-types=InternalIP",
	).await(func() error { return c.api.get("/readyz", nil) })
	c.start("controllers", c.control, "controllers", "--kubeconfig="+c.path("kubeconfig"), "--leader-elect=false",
		"--service-account-private-key-file="+c.path("sa.key"), "--root-ca-file=/run/apiserver/apiserver.crt")
	c.start("scheduler", c.node, "scheduler", "--kubeconfig="+c.path("kubeconfig"), "--leader-elect=false")
	c.kubectl = []string{"env", "HOME=/run", c.control, "kubectl", "--kubeconfig=" + c.path("kubeconfig")}
	c.apply(c.t, kubeDNS)
}

// apply creates or changes the objects of a manifest, also fields that another program has set.
func (c *cluster) apply(t *testing.T, manifest string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := c.command(ctx, append(c.kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-")...)
	cmd.Stdin = strings.NewReader(manifest)
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kubectl apply: %v\n%s", err, output)
	}
}

// configure writes the files of configuration.
func (c *cluster) configure(t *testing.T) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	values := strings.NewReplacer("$DIR", c.dir, "$NODE_IP", nodeIP, "$DNS", clusterIP, "$COREDNS_PORT", strings.TrimPrefix(coreDNS, nodeIP+":"),
		"$STRANGER", strangersIP, "$TOKEN", adminToken, "$CGROUP", c.cgroups.name, "$PAUSE", pauseImage)
	for name, text := range map[string]string{
		"sa.key":                 string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
		"tokens.csv":             "$TOKEN,admin,admin,system:masters\n",
		"kubeconfig":             kubeconfig,
		"containerd.toml":        containerdConfig,
		"cni/10-bridge.conflist": bridgeConfig,
		"kubelet.yaml":           kubeletConfig,
		"proxy.yaml":             proxyConfig,
		"Corefile":               corefile,
		"mesh.yaml":              "{}\n",
		"resolv.conf":            "nameserver " + nodeIP + "\n",
	} {
		path := c.path(name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(values.Replace(text)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

const kubeconfig = `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: $TOKEN}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

// containerdConfig keeps everything on a tmpfs. restrict_oom_score_adj is for root without
// CAP_SYS_RESOURCE, as in a container.
const containerdConfig = `
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$PAUSE"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$DIR/cni"
`

const bridgeConfig = `{
  "cniVersion": "0.4.0", "name": "pods",
  "plugins": [
    {"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
     "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}`

const kubeletConfig = `
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: /$CGROUP
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
enforceNodeAllocatable: []
evictionHard: {memory.available: "0%", nodefs.available: "0%", nodefs.inodesFree: "0%", imagefs.available: "0%"}
imageGCHighThresholdPercent: 100
clusterDNS: [$DNS]
clusterDomain: cluster.local
resolvConf: $DIR/resolv.conf
volumePluginDir: /var/lib/kubelet/plugins-exec
maxPods: 250
registryPullQPS: 0
`

// proxyConfig leaves the sizes of conntrack, which are not per namespace.
const proxyConfig = `
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: iptables
clientConnection: {kubeconfig: $DIR/kubeconfig}
clusterCIDR: 10.244.0.0/16
hostnameOverride: node
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
linux: {oomScoreAdj: 0}
oomScoreAdj: 0
`

const corefile = `
cluster.local:$COREDNS_PORT in-addr.arpa:$COREDNS_PORT {
	errors
	kubernetes {
		kubeconfig $DIR/kubeconfig
	}
}
.:$COREDNS_PORT {
	errors
	template IN A {
		answer "{{ .Name }} 30 IN A $STRANGER"
	}
	template ANY ANY
}
`

// kubeDNS is the Service at the address that kubelet writes into the resolv.conf of pods. It
// has no selector: CoreDNS runs beside the pods.
var kubeDNS = strings.NewReplacer("$DNS", clusterIP, "$NODE_IP", nodeIP, "$PORT", strings.TrimPrefix(coreDNS, nodeIP+":")).Replace(`
apiVersion: v1
kind: Service
metadata: {name: kube-dns, namespace: kube-system}
spec:
  clusterIP: $DNS
  ports: [{name: dns, port: 53, protocol: UDP}, {name: dns-tcp, port: 53, protocol: TCP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: kube-dns, namespace: kube-system, labels: {kubernetes.io/service-name: kube-dns}}
addressType: IPv4
ports: [{name: dns, port: $PORT, protocol: UDP}, {name: dns-tcp, port: $PORT, protocol: TCP}]
endpoints: [{addresses: [$NODE_IP], conditions: {ready: true}}]
`)

// ctr returns a command line of ctr.
func ctr(args ...string) []string {
	return append([]string{"env", "TMPDIR=/run", "ctr", "--address=/run/containerd/containerd.sock", "--namespace=k8s.io"}, args...)
}
