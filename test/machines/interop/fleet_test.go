package interop

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
	"github.com/nametap/nametap/test/machines/lab"
)

// The addresses of the agents of TestFleet: the API server connects to no loopback address.
const (
	fleetWell = lab.ClusterAddr + ":15020"
	fleetLost = lab.ClusterAddr + ":15055"
)

// TestFleet shows agents through a real API server, by a real kubectl: one with a table, one without a control plane, and a pod
// that no agent answers in. Users see what their rights permit.
func TestFleet(t *testing.T) { // R24, R26
	c := lab.NewCluster(t)
	c.StartEtcd()
	c.StartAPIServer()
	build := exec.Command("go", "build", "-o", c.Path("kubectl-nametap"), "./cmd/kubectl-nametap")
	build.Dir = lab.Repository()
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	kubectl := c.Write("kubectl", fmt.Sprintf("#!/bin/sh\nexec %s kubectl \"$@\"\n", lab.Peer(t, "kubernetes")))
	if err := os.Chmod(kubectl, 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	c.Apply(fleetObjects)
	c.Write("objects/web.yaml", service("web", "10.96.1.1"))
	c.Discovery("discovery", "127.0.0.1:15014", nil, "--config-dir", c.Path("objects"), "--grpc-addr", "127.0.0.1:15010")
	c.Run(func() { fakedns.Start(t, upstream, fakedns.On(netip.MustParseAddrPort("127.0.0.1:53"))) })
	c.Agent("web-0", "shop", "--upstream", "127.0.0.1", "--dns-addr", "127.0.0.1:15053", "--status-addr", fleetWell, "--xds-addr", "127.0.0.1:15010", "--xds-plaintext")
	c.Launch("lost-0", "bank", "--upstream", "127.0.0.1", "--dns-addr", "127.0.0.1:15153", "--status-addr", fleetLost, "--xds-addr", "127.0.0.1:1", "--xds-plaintext")
	for _, p := range []struct{ namespace, name, port string }{{"shop", "web-0", "15020"}, {"bank", "lost-0", "15055"}, {"bank", "mute-0", "15099"}} {
		c.Apply(fmt.Sprintf(fleetPod, p.name, p.namespace, p.port))
		status := `{"status": {"phase": "Running", "podIP": "` + lab.ClusterAddr + `", "podIPs": [{"ip": "` + lab.ClusterAddr + `"}], "containerStatuses": [
			{"name": "nametap", "image": "nametap", "imageID": "x", "ready": true, "restartCount": 0, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]}}`
		path := "/api/v1/namespaces/" + p.namespace + "/pods/" + p.name + "/status"
		if code, answer := c.Request(http.MethodPatch, path, "application/merge-patch+json", []byte(status)); code != http.StatusOK {
			t.Fatalf("%d %s", code, answer)
		}
	}
	fleet := func(args ...string) (string, int) {
		output, err := c.Try("", []string{"HOME=" + c.Dir, "PATH=" + c.Dir + ":" + os.Getenv("PATH")},
			append([]string{"sh", "-c", `exec "$0" "$@" 2>&1`, c.Path("kubectl-nametap"), "fleet", "--kubeconfig", c.Path("kubeconfig"), "--for", "0s"}, args...)...)
		if failed, ok := errors.AsType[*exec.ExitError](err); ok {
			return output, failed.ExitCode()
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, output)
		}
		return output, 0
	}
	want := func(code int, args []string, texts ...string) {
		t.Helper()
		output, got := fleet(args...)
		for _, text := range texts {
			if !regexp.MustCompile(`(?m)` + text).MatchString(output) {
				t.Errorf("%q: want %q in\n%s", args, text, output)
			}
		}
		if got != code {
			t.Errorf("%q: exit code %d, want %d\n%s", args, got, code, output)
		}
	}
	lab.Until(t, "the agent without a control plane says so", func() bool {
		output, _ := fleet("-n", "bank")
		return strings.Contains(output, "control_plane_unreachable (bank 1 of 2)")
	})
	want(1, nil, `^shop +web-0 +\S+ +[0-9a-f]{12} +\S+ +1 +\d+ +\S+ +ok +-$`, `^bank +lost-0 .* problem `, `^bank +mute-0 .* unknown .*connection refused`, `^agents: 3 \(1 ok, 1 unknown, 1 problem\)$`)
	want(0, []string{"-n", "shop", "--as", "viewer"}, `^agents: 1 \(1 ok\)$`)
	want(1, []string{"-n", "shop", "--as", "lister"}, `^unreachable \(shop 1 of 1\): pods "web-0:15020" is forbidden: .* cannot get resource "pods/proxy"`)
	want(1, []string{"--as", "nobody"}, `^kubectl nametap: listing pods: pods is forbidden: User "nobody" cannot list`)
	want(0, []string{"-n", "shop", "--as", "viewer", "--queries", "0s"}, `^kubectl nametap: the queries of 1 pods are not shown.*cannot create resource "pods/exec"`)
}

// fleetPod is a pod with an agent: its name, namespace and status port.
const fleetPod = `
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s, annotations: {nametap.dev/status: "{}"}}
spec: {nodeName: node, containers: [{name: nametap, image: nametap, ports: [{name: status, containerPort: %s}]}]}
`

// fleetObjects are the namespaces, and the rights of users.
const fleetObjects = `
{apiVersion: v1, kind: Namespace, metadata: {name: shop}}
---
{apiVersion: v1, kind: Namespace, metadata: {name: bank}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: shop}}
---
{apiVersion: v1, kind: ServiceAccount, metadata: {name: default, namespace: bank}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: lister}
rules: [{apiGroups: [""], resources: [pods], verbs: [get, list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: viewer}
rules: [{apiGroups: [""], resources: [pods/proxy], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: lister}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: lister}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: lister}, {apiGroup: rbac.authorization.k8s.io, kind: User, name: viewer}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: viewer}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: viewer}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: viewer}]
`
