package node

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/test/machines/lab"
)

// What the cluster has.
const (
	nodeIP    = "172.30.0.2"
	clusterIP = "10.96.0.10" // of kube-dns
	dnsPort   = "1053"       // of CoreDNS
	// strangersIP is the address of all names that the mesh does not have. If a mesh name
	// has it, the nameserver answered and not the agent.
	strangersIP = "198.51.100.80"
	// The images that no manifest names.
	pauseImage = "docker.io/library/nt-pause:1"
	loadImage  = "docker.io/library/nt-load:1"
)

// A cluster is a Kubernetes cluster of one node.
type cluster struct {
	*lab.Cluster
	node    *lab.Node
	kubelet *lab.Process
	istiod  *lab.Istiod
}

// in returns the cluster for a check.
func (c *cluster) in(t *testing.T) *cluster {
	in := *c
	in.Cluster = c.In(t)
	return &in
}

// start starts a program of the node.
func (c *cluster) start(name string, args ...string) *lab.Process {
	return c.Spawn(name, c.Command(c.TB.Context(), args...))
}

// newCluster starts a cluster with the project's images and waits until its node is ready.
func newCluster(t *testing.T, images []string) *cluster {
	t.Helper()
	binary := lab.Peer(t, "node")
	begun := time.Now()
	n := lab.NewNode(t)
	c := &cluster{Cluster: lab.ClusterIn(n.Place), node: n}
	checks := checkImages(t, c.Mkdir("images", 0))
	values := strings.NewReplacer("$DIR", c.Dir, "$DNS", clusterIP, "$PORT", dnsPort, "$STRANGER", strangersIP, "$NODE_IP", nodeIP, "$CGROUP", n.Cgroup, "$PAUSE", pauseImage)
	for name, text := range map[string]string{
		"containerd.toml": containerdConfig, "cni/10-bridge.conflist": bridgeConfig, "kubelet.yaml": kubeletConfig, "proxy.yaml": proxyConfig,
		"Corefile": corefile, "mesh.yaml": "{}\n", "resolv.conf": "nameserver $NODE_IP\n",
	} {
		c.Write(name, values.Replace(text))
	}
	// The node has an address, and a default route that ends nowhere.
	c.Exec("ip", "link", "add", "node0", "type", "veth", "peer", "name", "node1")
	c.Exec("ip", "link", "set", "node0", "up")
	c.Exec("ip", "link", "set", "node1", "up")
	c.Exec("ip", "address", "add", nodeIP+"/24", "dev", "node0")
	c.Exec("ip", "route", "add", "default", "via", "172.30.0.1", "dev", "node0")

	containerd := c.start("containerd", "env", "TMPDIR=/run", "containerd", "--config", c.Path("containerd.toml"))
	c.StartEtcd()
	c.StartAPIServer("--bind-address=0.0.0.0", "--advertise-address="+nodeIP, "--service-cluster-ip-range=10.96.0.0/16", "--kubelet-preferred-address-types=InternalIP")
	c.StartControllers()
	c.Kubernetes("node", "scheduler", "--kubeconfig="+c.Path("kubeconfig"), "--leader-elect=false")
	c.Apply(values.Replace(kubeDNS))
	containerd.Await("containerd is ready", func() bool {
		_, err := c.ctr("", "version")
		return err == nil
	})
	c.startKubelet()
	c.start("kube-proxy", binary, "proxy", "--config="+c.Path("proxy.yaml"))
	c.start("coredns", binary, "coredns", "-conf", c.Path("Corefile"))
	c.importImages(append(images, checks))
	c.kubelet.Await("the node is ready", func() bool {
		var node corev1.Node
		return c.Do(http.MethodGet, "/api/v1/nodes/node", nil, &node) == nil && slices.ContainsFunc(node.Status.Conditions, func(condition corev1.NodeCondition) bool {
			return condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
		})
	})
	t.Logf("the node is ready after %v", time.Since(begun).Round(time.Millisecond))
	return c
}

// startKubelet starts kubelet, also after its end.
func (c *cluster) startKubelet() {
	c.kubelet = c.Kubernetes("node", "kubelet", "--config="+c.Path("kubelet.yaml"), "--kubeconfig="+c.Path("kubeconfig"),
		"--hostname-override=node", "--node-ip="+nodeIP, "--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki", "--v=2")
}

// startIstiod starts an unmodified istiod beside the pods, behind its Service.
func (c *cluster) startIstiod() {
	c.ApplyIstio()
	c.Apply(strings.ReplaceAll(`
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
	c.Apply(serviceEntry)
	c.istiod = c.Istiod(lab.IstiodOptions{})
}

// serviceEntry is the mesh name that istiod knows, the same as in the manifest with nametap-discovery.
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
cluster.local:$PORT in-addr.arpa:$PORT {
	errors
	kubernetes {
		kubeconfig $DIR/kubeconfig
	}
}
.:$PORT {
	errors
	template IN A {
		answer "{{ .Name }} 30 IN A $STRANGER"
	}
	template ANY ANY
}
`

// kubeDNS is the Service at the address that kubelet writes into the resolv.conf of pods. It
// has no selector: CoreDNS runs beside the pods.
const kubeDNS = `
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
`

// ctr runs a command of containerd's client with the content of a file as its input.
func (c *cluster) ctr(input string, args ...string) (string, error) {
	args = append([]string{"env", "TMPDIR=/run", "ctr", "--address=/run/containerd/containerd.sock", "--namespace=k8s.io"}, args...)
	if input != "" {
		args = append([]string{"sh", "-c", `exec "$@" <"$0"`, input}, args...)
	}
	return c.Try("", nil, args...)
}

// buildImages builds the images of the project by `make image`, and returns their files. There is no engine and no
// registry.
func buildImages(t *testing.T) []string {
	t.Helper()
	build := exec.CommandContext(t.Context(), "make", "--silent", "--directory="+lab.Repository(), "image", "ARCHES="+runtime.GOARCH)
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, output)
	}
	layouts, err := filepath.Glob(filepath.Join(lab.Repository(), "bin/images/*.tar"))
	if err != nil || len(layouts) != 3 {
		t.Fatalf("make image has built %q, %v", layouts, err)
	}
	return layouts
}

// checkImages makes an archive in a directory, as `docker save` does, with the images of the checks: Debian, one that
// sleeps, and one with nametap-load.
func checkImages(t *testing.T, dir string) string {
	t.Helper()
	const layer = `mirror=$("$0/tools/debian-mirror")
debootstrap --variant=minbase --include=iptables bookworm "$1/root" "$mirror"
tar --numeric-owner --directory "$1/root" --create --file "$1/layer.tar" \
	--exclude './dev/*' --exclude './proc/*' --exclude './sys/*' --exclude './var/cache/apt/*' --exclude './var/lib/apt/lists/*' \
	--exclude './usr/share/doc/*' --exclude './usr/share/locale/*' --exclude './usr/share/man/*' .
rm -r "$1/root"`
	run := func(script string, args ...string) error {
		if output, err := exec.CommandContext(t.Context(), "sh", append([]string{"-euc", script}, args...)...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, output)
		}
		return nil
	}
	debian, err := lab.Cached("debian-layer", []string{layer}, func(dir string) error {
		t.Logf("making a layer of Debian with debootstrap in %s, once", dir)
		return run(layer, lab.Repository(), dir)
	})
	if err == nil {
		err = run(`cd "$0"
sum() { sha256sum "$1" | cut -c 1-64; }
mkdir -p tools/usr/local/bin && cp "$2" tools/usr/local/bin/ && tar --numeric-owner --directory tools --create --file tools.tar ./usr
cp "$1" debian.tar
image() { # NAME ENTRYPOINT LAYER...
	name=$1 entrypoint=$2 files= ids=
	shift 2
	for layer; do files="$files,\"$layer\"" ids="$ids,\"sha256:$(sum "$layer")\""; done
	echo '{"architecture": "'"$(dpkg --print-architecture)"'", "os": "linux", "config": {"Entrypoint": '"$entrypoint"', "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}, "rootfs": {"type": "layers", "diff_ids": ['"${ids#,}"']}}' >"$name.json"
	manifest="$manifest,{\"Config\": \"$name.json\", \"RepoTags\": [\"docker.io/library/$name\"], \"Layers\": [${files#,}]}"
}
manifest=
image debian:12-slim null debian.tar
image nt-pause:1 '["sleep", "infinity"]' debian.tar
image nt-load:1 null debian.tar tools.tar
echo "[${manifest#,}]" >manifest.json
tar --create --file all.tar manifest.json ./*.json debian.tar tools.tar`, dir, filepath.Join(debian, "layer.tar"), lab.LoadProgram(t))
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "all.tar")
}

// importImages imports archives into containerd, which then has all images of the manifests. P7.
func (c *cluster) importImages(archives []string) {
	c.TB.Helper()
	for _, archive := range archives {
		if output, err := c.ctr(archive, "images", "import", "-"); err != nil {
			c.TB.Fatalf("importing %s: %v\n%s", archive, err, output)
		}
	}
	all, err := c.ctr("", "images", "list", "--quiet")
	if err != nil {
		c.TB.Fatalf("%v\n%s", err, all)
	}
	wanted := 0
	for _, variant := range []string{"istiod", "discovery"} {
		for line := range strings.Lines(manifest(c.TB, variant)) {
			_, image, found := strings.Cut(strings.TrimSpace(line), "image: ")
			image, _, _ = strings.Cut(image, " #")
			if found && strings.HasPrefix(image, "nametap") {
				wanted++
				if !slices.Contains(strings.Fields(all), "docker.io/library/"+image) {
					c.TB.Fatalf("containerd has the images\n%snot %s of the manifests", all, image)
				}
			}
		}
	}
	if wanted == 0 {
		c.TB.Fatal("the manifests name no image")
	}
}

// manifest returns the text of a manifest in deploy/kubernetes.
func manifest(tb testing.TB, variant string) string {
	tb.Helper()
	text, err := os.ReadFile(filepath.Join(lab.Repository(), "deploy/kubernetes", variant+".yaml"))
	if err != nil {
		tb.Fatal(err)
	}
	return string(text)
}
