package interop

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/nametap/nametap/internal/testkit/netns"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/peers"
)

const (
	issuer     = "https://kubernetes.default.svc"
	adminToken = "admin"
	apiAddr    = "127.0.0.1:6443"
)

// A cluster is a Kubernetes control plane in a network namespace: etcd, the API server and the
// controllers. It has no kubelet: nodes and pods are only objects.
type cluster struct {
	place
	kubernetes string // the binary
	istio      string // the binary
	key        *rsa.PrivateKey
	client     *http.Client
	apiserver  *daemon
	managers   *daemon // Kubernetes' controllers
	machines   int     // that are connected to it
}

// newCluster starts a cluster with the custom resource definitions of Istio. Its files are kept
// if the test fails.
func newCluster(tb testing.TB) *cluster {
	tb.Helper()
	c := prepareCluster(tb)
	c.boot()
	c.apply(istioDefinitions(tb))
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: istio-system}\n")
	return c
}

// istioDefinitions returns the custom resource definitions of Istio.
func istioDefinitions(tb testing.TB) string {
	tb.Helper()
	return peers.File(tb, "istiod", "istio.io/istio", "manifests/charts/base/files/crd-all.gen.yaml")
}

// prepareCluster makes the place and the files of a cluster.
func prepareCluster(tb testing.TB) *cluster {
	tb.Helper()
	if os.Getuid() != 0 {
		tb.Fatal("network namespaces need root: run `make interop` as root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		tb.Fatalf("%v: install the package iproute2", err)
	}
	c := &cluster{kubernetes: peers.Build(tb, "kubernetes"), istio: peers.Build(tb, "istiod"), place: place{netns.New(tb), tb, logDir(tb)}}
	c.client = &http.Client{
		Timeout: wait.Limit,
		Transport: &http.Transport{
			DialContext:     c.dial,
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // of a server that the test has started
		},
	}
	tb.Cleanup(c.client.CloseIdleConnections)
	// The API server wants an address that is not a loopback one.
	c.Exec("ip", "link", "add", "api", "type", "veth", "peer", "name", "api-peer")
	c.Exec("ip", "address", "add", "172.31.0.1/24", "dev", "api")
	c.Exec("ip", "link", "set", "api-peer", "up")
	c.Exec("ip", "link", "set", "api", "up")
	c.Exec("ip", "route", "add", "default", "dev", "api")
	c.writeFiles()
	return c
}

// boot starts the programs of a cluster, the API server with more flags.
func (c *cluster) boot(flags ...string) {
	c.tb.Helper()
	c.startEtcd()
	c.startAPIServer(flags...)
	c.managers = c.kube("controllers", "--kubeconfig", c.path("kubeconfig"), "--service-account-private-key-file", c.path("sa.key"),
		"--root-ca-file", c.path("certs/apiserver.crt"), "--leader-elect=false",
		// There is no kubelet that reports the state of nodes.
		"--controllers=*,-node-lifecycle-controller,-taint-eviction-controller,-pod-garbage-collector-controller")
}

// startEtcd starts the store of the API server.
func (c *cluster) startEtcd() *daemon {
	c.tb.Helper()
	return c.etcdIn(c.path("etcd"))
}

// etcdIn starts the store of the API server with the data in a directory.
func (c *cluster) etcdIn(dir string) *daemon {
	c.tb.Helper()
	return c.kube("etcd", "--data-dir", dir, "--unsafe-no-fsync", // the store ends with the test
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
}

// logDir makes a directory that is removed if the test passes.
func logDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "nt-interop-") //nolint:usetesting // TempDir would remove the logs of a failed test
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("the logs of all processes are in %s", dir)
		} else if err := os.RemoveAll(dir); err != nil {
			tb.Error(err)
		}
	})
	return dir
}

// writeFiles writes the key of service accounts and the administrator's credentials.
func (c *cluster) writeFiles() {
	c.tb.Helper()
	var err error
	if c.key, err = rsa.GenerateKey(rand.Reader, 2048); err != nil {
		c.tb.Fatal(err)
	}
	public, err := x509.MarshalPKIXPublicKey(&c.key.PublicKey)
	if err != nil {
		c.tb.Fatal(err)
	}
	c.write("sa.key", string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(c.key)})))
	c.write("sa.pub", string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})))
	c.write("tokens.csv", adminToken+",admin,admin,system:masters\n")
	c.write("kubeconfig", fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s", insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, apiAddr, adminToken))
}

// kube starts one of the programs of Kubernetes.
func (c *cluster) kube(program string, args ...string) *daemon {
	c.tb.Helper()
	return c.run(program, exec.Command(c.kubernetes, append([]string{program}, args...)...))
}

// startAPIServer starts the API server with more flags, and returns when it is ready.
func (c *cluster) startAPIServer(flags ...string) {
	c.tb.Helper()
	c.apiserver = c.launchAPIServer("apiserver", "6443", flags...)
	c.apiserver.await("the API server is ready", func() bool {
		status, _ := c.try(http.MethodGet, "/readyz", "", nil)
		return status == http.StatusOK
	})
}

// launchAPIServer starts an API server without waiting. Several of them have the same objects.
func (c *cluster) launchAPIServer(name, port string, flags ...string) *daemon {
	c.tb.Helper()
	return c.run(name, exec.Command(c.kubernetes, append([]string{"apiserver", "--etcd-servers=http://127.0.0.1:2379", "--cert-dir", c.path("certs"),
		"--secure-port=" + port, "--bind-address=127.0.0.1", "--advertise-address=172.31.0.1",
		"--service-cluster-ip-range=10.96.0.0/16,fd00:96::/112", "--service-account-issuer=" + issuer,
		"--service-account-key-file", c.path("sa.pub"), "--service-account-signing-key-file", c.path("sa.key"),
		"--token-auth-file", c.path("tokens.csv"), "--authorization-mode=RBAC", "--allow-privileged=true"}, flags...)...))
}

// dial connects to an address in the cluster's namespace.
func (c *cluster) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	c.Run(func() { conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, addr) })
	return conn, err
}

// apiCertificate returns the certificate of the API server.
func (c *cluster) apiCertificate() string {
	c.tb.Helper()
	text, err := os.ReadFile(c.path("certs/apiserver.crt"))
	if err != nil {
		c.tb.Fatal(err)
	}
	return string(text)
}
