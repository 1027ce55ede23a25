package lab

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// What a cluster has.
const (
	Issuer     = "https://kubernetes.default.svc"
	AdminToken = "admin"
	APIAddr    = "127.0.0.1:6443"
	// ClusterAddr is the address of a cluster that is no node.
	ClusterAddr = "172.31.0.1"
)

// A Cluster is a Kubernetes control plane in a place: etcd, the API server and the controllers. It has no kubelet: nodes
// and pods are only objects.
type Cluster struct {
	*Place
	*Programs
	Key *rsa.PrivateKey // of the tokens of service accounts

	client *http.Client
}

// Programs are what a cluster runs, as long as its test, also if a subtest has started them again.
type Programs struct {
	Etcd, APIServer, ControllerManager *Process
	whole                              *Place
}

// NewCluster makes the place and the files of a cluster.
func NewCluster(tb testing.TB) *Cluster {
	tb.Helper()
	c := ClusterIn(NewPlace(tb))
	// The API server wants an address that is not a loopback one.
	c.Exec("ip", "link", "add", "api", "type", "veth", "peer", "name", "api-peer")
	c.Exec("ip", "address", "add", ClusterAddr+"/24", "dev", "api")
	c.Exec("ip", "link", "set", "api-peer", "up")
	c.Exec("ip", "link", "set", "api", "up")
	c.Exec("ip", "route", "add", "default", "dev", "api")
	return c
}

// ClusterIn makes the files of a cluster in a place: the key of service accounts and the administrator's credentials.
func ClusterIn(p *Place) *Cluster {
	p.TB.Helper()
	c := &Cluster{Place: p, Programs: &Programs{whole: p}}
	c.client = &http.Client{Timeout: time.Minute, Transport: &http.Transport{
		DialContext: c.Dial, MaxIdleConnsPerHost: 32, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // of a server that the test has started
	}}
	p.TB.Cleanup(c.client.CloseIdleConnections)
	var err error
	if c.Key, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
		p.TB.Fatal(err)
	}
	c.Write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(c.Key)})))
	c.Write("tokens.csv", AdminToken+",admin,admin,system:masters\n")
	c.Write("kubeconfig", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, APIAddr, AdminToken))
	return c
}

// In returns the cluster for a subtest.
func (c *Cluster) In(tb testing.TB) *Cluster {
	tb.Helper()
	in := *c
	in.Place = c.Place.In(tb)
	return &in
}

// Kubernetes starts one of the programs of Kubernetes that are in a peer.
func (c *Cluster) Kubernetes(peer, program string, args ...string) *Process {
	c.TB.Helper()
	return c.whole.Spawn(program, c.Command(context.WithoutCancel(c.TB.Context()), append([]string{Peer(c.TB, peer), program}, args...)...))
}

// Boot starts the programs of a cluster, the API server with more flags.
func (c *Cluster) Boot(flags ...string) {
	c.TB.Helper()
	c.StartEtcd()
	c.StartAPIServer(flags...)
	// There is no kubelet that reports the state of nodes.
	c.StartControllers("--controllers=*,-node-lifecycle-controller,-taint-eviction-controller,-pod-garbage-collector-controller")
}

// StartEtcd starts the store of the API server, which ends with the test.
func (c *Cluster) StartEtcd() {
	c.TB.Helper()
	c.Etcd = c.Kubernetes("kubernetes", "etcd", "--data-dir", c.Path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379", "--listen-peer-urls", "http://127.0.0.1:2380")
}

// StartAPIServer starts the API server with more flags, and returns when it is ready.
func (c *Cluster) StartAPIServer(flags ...string) {
	c.TB.Helper()
	c.APIServer = c.Kubernetes("kubernetes", "apiserver", append([]string{
		"--etcd-servers=http://127.0.0.1:2379", "--cert-dir", c.Path("certs"), "--bind-address=127.0.0.1", "--advertise-address=" + ClusterAddr,
		"--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112", "--service-account-issuer=" + Issuer,
		"--service-account-key-file", c.Path("sa.key"), "--service-account-signing-key-file", c.Path("sa.key"),
		"--token-auth-file", c.Path("tokens.csv"), "--authorization-mode=RBAC", "--allow-privileged=true",
	}, flags...)...)
	c.APIServer.Await("the API server is ready", func() bool {
		status, _ := c.Request(http.MethodGet, "/readyz", "", nil)
		return status == http.StatusOK
	})
}

// StartControllers starts Kubernetes' controllers with more flags.
func (c *Cluster) StartControllers(flags ...string) {
	c.TB.Helper()
	c.ControllerManager = c.Kubernetes("kubernetes", "controllers", append([]string{"--kubeconfig", c.Path("kubeconfig"),
		"--service-account-private-key-file", c.Path("sa.key"), "--root-ca-file", c.Path("certs/apiserver.crt"), "--leader-elect=false"}, flags...)...)
}

// TryKubectl runs a command of kubectl, and returns its output, which has its errors, too.
func (c *Cluster) TryKubectl(args ...string) (string, error) {
	return c.Try("", []string{"HOME=" + c.Dir}, append([]string{Peer(c.TB, "kubernetes"), "kubectl", "--kubeconfig", c.Path("kubeconfig")}, args...)...)
}

// Kubectl is like TryKubectl and fails the test if the command fails.
func (c *Cluster) Kubectl(args ...string) string {
	c.TB.Helper()
	output, err := c.TryKubectl(args...)
	if err != nil {
		c.TB.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, output)
	}
	return output
}

// TryHelm runs a command of Helm, which is "helm3" or "helm4", and returns its output, or its errors.
func (c *Cluster) TryHelm(version string, args ...string) (string, error) {
	return c.Try("", []string{"HOME=" + c.Dir, "KUBECONFIG=" + c.Path("kubeconfig")}, append([]string{Peer(c.TB, version)}, args...)...)
}

// Helm is like TryHelm and fails the test if the command fails.
func (c *Cluster) Helm(version string, args ...string) string {
	c.TB.Helper()
	output, err := c.TryHelm(version, args...)
	if err != nil {
		c.TB.Fatalf("%s %s: %v\n%s", version, strings.Join(args, " "), err, output)
	}
	return output
}
