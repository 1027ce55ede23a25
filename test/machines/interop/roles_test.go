package interop

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/discovery/pki"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// The directory of the manifests, and what discovery.yaml makes.
const (
	manifests        = "../../../deploy/kubernetes/"
	discoverySystem  = "nametap-system"
	discoveryAccount = "system:serviceaccount:" + discoverySystem + ":nametap-discovery"
	discoverySecret  = "/api/v1/namespaces/" + discoverySystem + "/secrets/nametap-discovery-tls"
	discoveryName    = "nametap-discovery." + discoverySystem + ".svc"
	rootConfigMap    = "nametap-ca-root-cert"
)

// manifestObjects are the objects of discovery.yaml and webhook.yaml that the tests look at.
type manifestObjects struct {
	rules []rbacv1.PolicyRule
	args  []string // of nametap-discovery
}

// readManifest reads discovery.yaml and webhook.yaml.
func readManifest(t *testing.T) manifestObjects {
	t.Helper()
	var texts []string
	for _, name := range []string{"discovery.yaml", "webhook.yaml"} {
		content, err := os.ReadFile(manifests + name)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, string(content))
	}
	var all manifestObjects
	for document := range strings.SplitSeq(strings.Join(texts, "\n---\n"), "\n---\n") {
		var kind struct{ Kind string }
		var role rbacv1.Role // a ClusterRole has the same fields
		var deployment appsv1.Deployment
		into := func(target any) {
			if err := yaml.Unmarshal([]byte(document), target); err != nil {
				t.Fatalf("%v\n%s", err, document)
			}
		}
		switch into(&kind); kind.Kind {
		case "Role", "ClusterRole":
			into(&role)
			all.rules = append(all.rules, role.Rules...)
		case "Deployment":
			into(&deployment)
			all.args = deployment.Spec.Template.Spec.Containers[0].Args
		}
	}
	if len(all.rules) == 0 || len(all.args) == 0 {
		t.Fatalf("discovery.yaml: %+v", all)
	}
	return all
}

// kubectl runs a command of kubectl, and returns its output, which has its errors, too.
func (c *cluster) kubectl(args ...string) (string, error) {
	c.tb.Helper()
	ctx, cancel := context.WithTimeout(c.tb.Context(), wait.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.kubernetes, append([]string{"kubectl", "--kubeconfig", c.path("kubeconfig")}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir)
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output
	err := c.Start(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	return output.String(), err
}

// mustKubectl is like kubectl and fails the test if the command fails.
func (c *cluster) mustKubectl(args ...string) string {
	c.tb.Helper()
	output, err := c.kubectl(args...)
	if err != nil {
		c.tb.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, output)
	}
	return output
}

// auditPolicy makes the API server log requests with their users.
const auditPolicy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"

// An auditEvent is a line of the API server's log.
type auditEvent struct {
	Verb       string
	RequestURI string
	User       struct{ Username string }
	ObjectRef  struct{ Resource, Subresource, Namespace, Name, APIGroup string }

	ResponseStatus struct{ Code int }
}

// audited returns the events of requests of nametap-discovery.
func (c *cluster) audited() []auditEvent {
	c.tb.Helper()
	text, err := os.ReadFile(c.path("audit.log"))
	if err != nil {
		c.tb.Fatal(err)
	}
	var all []auditEvent
	for line := range strings.Lines(string(text)) {
		var e auditEvent
		if !strings.HasSuffix(line, "\n") {
			continue // it is being written
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			c.tb.Fatalf("%v: %s", err, line)
		}
		if e.User.Username == discoveryAccount {
			all = append(all, e)
		}
	}
	return all
}

// A right is what a rule permits: one verb for one resource, or for one object of it.
type right struct{ group, resource, verb, name string }

// rights returns the rights of a rule.
func rights(rule rbacv1.PolicyRule) []right {
	var all []right
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, group := range rule.APIGroups {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				for _, name := range names {
					all = append(all, right{group, resource, verb, name})
				}
			}
		}
	}
	return all
}

// permits reports whether a request used this right.
func (r right) permits(e auditEvent) bool {
	resource := e.ObjectRef.Resource
	if e.ObjectRef.Subresource != "" {
		resource += "/" + e.ObjectRef.Subresource
	}
	return e.Verb == r.verb && resource == r.resource && e.ObjectRef.APIGroup == r.group && (r.name == "" || r.name == e.ObjectRef.Name)
}

// A replica is a nametap-discovery with the rights and the arguments of the manifest.
type replica struct {
	*daemon
	c     *cluster
	ports [3]string // TLS, plaintext, status
}

// replica starts a nametap-discovery with an access of its service account, and returns when it is
// ready. Replicas differ in their ports, which begin with digits.
func (c *cluster) replica(args []string, digits string) replica {
	c.tb.Helper()
	account := "/api/v1/namespaces/" + discoverySystem + "/serviceaccounts/nametap-discovery"
	c.awaitObject(account)
	var answer struct{ Status struct{ Token string } }
	c.request(http.MethodPost, account+"/token", map[string]any{
		"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{"expirationSeconds": 3600},
	}, &answer)
	access := c.write("kubeconfig-"+digits, strings.ReplaceAll(c.text("kubeconfig"), "{token: "+adminToken+"}", "{token: "+answer.Status.Token+"}"))
	r := replica{c: c, ports: [3]string{digits + "12", digits + "10", digits + "14"}}
	cmd := exec.Command(discoveryBinary, append(slices.Clone(args), "--kubeconfig", access, "--state-dir", "",
		"--tls-addr", ":"+r.ports[0], "--grpc-addr", ":"+r.ports[1], "--http-addr", "127.0.0.1:"+r.ports[2],
		"--inject-addr", ":"+digits+"17", "--inject-config", c.injectConfig())...)
	cmd.Env = append(os.Environ(), "KUBERNETES_SERVICE_HOST=172.31.0.1") // as in a pod, where it serves on for a while at its end
	r.daemon = c.run("discovery-"+digits, cmd)
	r.await("nametap-discovery is ready", func() bool {
		response, err := c.client.Get("http://127.0.0.1:" + r.ports[2] + "/healthz/ready")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return r
}

// text returns the text of a file of the cluster.
func (c *cluster) text(name string) string {
	c.tb.Helper()
	text, err := os.ReadFile(c.path(name))
	if err != nil {
		c.tb.Fatal(err)
	}
	return string(text)
}

// publishedRoot returns the root certificate in the ConfigMap of a namespace, or "".
func (c *cluster) publishedRoot(namespace string) string {
	c.tb.Helper()
	status, body := c.try(http.MethodGet, "/api/v1/namespaces/"+namespace+"/configmaps/"+rootConfigMap, "", nil)
	if status != http.StatusOK {
		return ""
	}
	var configMap corev1.ConfigMap
	if err := json.Unmarshal(body, &configMap); err != nil {
		c.tb.Fatal(err)
	}
	return configMap.Data["root-cert.pem"]
}

// secureAgent starts an agent that connects to a replica with TLS, a token of its service account and
// the published root certificate, and returns when it has a table.
func (m *machine) secureAgent(p pod, r replica) *agent {
	m.tb.Helper()
	var root string
	wait.Until(m.tb, "the root certificate is published", func() bool {
		root = m.c.publishedRoot(p.namespace)
		return root != ""
	})
	return m.agent(p, "--xds-addr", m.address(r.ports[0]), "--xds-server-name", discoveryName,
		"--xds-root-ca", m.write("root-cert.pem", root), "--xds-token-file", m.project(m.c.token(p.namespace, audience)), "--service-account", "default")
}

// has waits until the agent's table has a host with an address.
func (a *agent) has(host, address string) {
	a.tb.Helper()
	wait.Until(a.tb, host+" is in the table", func() bool { return slices.Contains(a.table()[host].IPs, address) })
}

// TestRoles runs two replicas of nametap-discovery with the rights of the manifest, lets them do all that
// they can, and compares the log of the API server with the rules: no request was forbidden, every rule
// was used, and Pods were not requested.
func TestRoles(t *testing.T) { // D7, D20
	c := prepareCluster(t)
	audit := []string{"--audit-policy-file", c.write("audit.yaml", auditPolicy), "--audit-log-path", c.path("audit.log")}
	c.boot(audit...)
	manifest := readManifest(t)
	c.mustKubectl("apply", "-f", manifests+"discovery.yaml", "-f", manifests+"webhook.yaml")
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n")
	c.apply("apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: 10.96.1.1, ports: [{port: 80}]}\n")
	first, second := c.replica(manifest.args, "160"), c.replica(manifest.args, "170")
	m := c.machine(dual)
	a := m.secureAgent(pod{"one", "shop"}, first)
	a.has("web.shop.svc.cluster.local", "10.96.1.1")

	c.customResources(t, a)
	c.sharedObjects(t)
	c.automaticVIP(t)

	// An API server that cannot stream lists, as before Kubernetes 1.34. While it starts, before it knows
	// the roles, it would forbid the requests of replicas.
	for _, r := range []replica{first, second} {
		r.end(syscall.SIGTERM)
	}
	c.apiserver.end(syscall.SIGKILL)
	c.startAPIServer(append(audit, "--feature-gates=WatchList=false")...)
	third := c.replica(manifest.args, "180")
	a.end(syscall.SIGTERM)
	m.secureAgent(pod{"two", "shop"}, third).has("new.example.com", "198.51.100.2")
	c.compareAudit(t, manifest.rules)
}

// customResources follows the ways to install the custom resources: the project's where there are
// none, again, and Istio's afterwards. The agent's table has the ServiceEntries.
func (c *cluster) customResources(t *testing.T, a *agent) {
	t.Helper()
	t.Logf("%s", c.mustKubectl("create", "-f", manifests+"crds.yaml"))
	const definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/serviceentries.networking.istio.io"
	version := func() string {
		var o struct {
			Metadata struct{ ResourceVersion string }
		}
		c.get(definition, &o)
		return o.Metadata.ResourceVersion
	}
	wait.Until(t, "ServiceEntries are served", func() bool {
		status, _ := c.try(http.MethodGet, "/apis/networking.istio.io/v1/serviceentries", "", nil)
		return status == http.StatusOK
	})
	c.apply(importDefinition)
	c.apply(importObjects("v1beta1"))
	a.has(webOfSet, "10.96.112.1")
	c.remove(importObjects("v1beta1"))
	// A field that only Istio knows stays.
	entry := strings.Replace(entryOf("new.example.com", "198.51.100.2"), "resolution: NONE", "resolution: NONE, location: MESH_EXTERNAL", 1)
	c.mustKubectl("apply", "-f", c.write("entry.yaml", entry))
	a.has("new.example.com", "198.51.100.2")
	c.apply("apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: default, namespace: shop}\nspec: {egress: [{hosts: [./web.shop.svc.cluster.local]}]}\n")
	wait.Until(t, "the Sidecar hides it", func() bool { return len(a.table()) == 1 })
	c.mustKubectl("delete", "--namespace=shop", "sidecar", "default")

	before := version()
	output, err := c.kubectl("create", "-f", manifests+"crds.yaml")
	if err == nil || strings.Count(output, "already exists") != 2 || version() != before {
		t.Errorf("kubectl create where there are custom resources: %v, version %s, before %s\n%s", err, version(), before, output)
	}
	output, err = c.kubectl("create", "-f", c.write("bad.yaml", strings.ReplaceAll(entry, "[new.example.com]", "new.example.com")))
	if err == nil || !strings.Contains(output, "spec.hosts") {
		t.Errorf("a ServiceEntry whose hosts are no list: %v\n%s", err, output)
	}
	c.apply(istioDefinitions(t)) // as istioctl does
	before = version()
	if output, err := c.kubectl("create", "-f", manifests+"crds.yaml"); err == nil || version() != before {
		t.Errorf("kubectl create has changed the custom resources of Istio: %v\n%s", err, output)
	}
	var kept struct{ Spec struct{ Location string } }
	c.get("/apis/networking.istio.io/v1/namespaces/shop/serviceentries/new", &kept)
	if kept.Spec.Location != "MESH_EXTERNAL" {
		t.Errorf("the ServiceEntry is %+v", kept)
	}
	c.apply(strings.ReplaceAll(entryOf("more.example.com", "198.51.100.3"), "name: new", "name: more"))
	a.has("more.example.com", "198.51.100.3")
	a.has("new.example.com", "198.51.100.2")
}

// sharedObjects makes replicas write the objects that they share: the certificate is due, a namespace is
// new, and a ConfigMap is changed.
func (c *cluster) sharedObjects(t *testing.T) {
	t.Helper()
	old, err := pki.NewPolicy([]string{discoveryName}).Renewed(nil, time.Now().Add(-80*24*time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	data, err := old.Data()
	if err != nil {
		t.Fatal(err)
	}
	encoded := map[string]string{}
	for key, value := range data {
		encoded[key] = base64.StdEncoding.EncodeToString(value)
	}
	patch, err := json.Marshal(map[string]any{"data": encoded})
	if err != nil {
		t.Fatal(err)
	}
	if status, answer := c.try(http.MethodPatch, discoverySecret, "application/merge-patch+json", patch); status != http.StatusOK {
		t.Fatalf("changing the Secret: %d: %s", status, answer)
	}
	wait.Until(t, "a replica has renewed the certificate", func() bool {
		var secret corev1.Secret
		c.get(discoverySecret, &secret)
		return string(secret.Data["ca.crt"]) == old.Roots() && string(secret.Data["tls.crt"]) != string(data["tls.crt"])
	})
	wait.Until(t, "the root certificate is replaced", func() bool { return c.publishedRoot("shop") == old.Roots() })
	c.apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: late}\n")
	wait.Until(t, "a new namespace has it", func() bool { return c.publishedRoot("late") == old.Roots() })
	if root := c.publishedRoot("kube-system"); root != "" {
		t.Error("kube-system has it")
	}
}

// automaticVIP makes a replica write the automatic VIP of a host.
func (c *cluster) automaticVIP(t *testing.T) {
	t.Helper()
	const path = "/apis/networking.istio.io/v1/namespaces/shop/serviceentries/vip"
	c.apply(`{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {name: vip, namespace: shop}, spec: {hosts: [vip.example.com], resolution: DNS}}`)
	wait.Until(t, "the status has the VIP", func() bool {
		var entry struct {
			Status struct {
				Addresses []struct{ Host, Value string }
			}
		}
		c.get(path, &entry)
		return len(entry.Status.Addresses) > 0 && entry.Status.Addresses[0].Host == "vip.example.com"
	})
}

// compareAudit compares the log of the API server with the rules.
func (c *cluster) compareAudit(t *testing.T, rules []rbacv1.PolicyRule) {
	t.Helper()
	requests := map[string]int{}
	events := c.audited()
	for _, e := range events {
		requests[fmt.Sprintf("%s %s %s %q", e.Verb, e.ObjectRef.APIGroup, filepath.Join(e.ObjectRef.Resource, e.ObjectRef.Subresource), e.ObjectRef.Name)]++
		if e.ResponseStatus.Code == http.StatusForbidden {
			t.Errorf("forbidden: %s %s", e.Verb, e.RequestURI)
		}
		if e.ObjectRef.Resource == "pods" {
			t.Errorf("a request for pods: %s %s", e.Verb, e.RequestURI)
		}
	}
	for _, rule := range rules {
		for _, r := range rights(rule) {
			if !slices.ContainsFunc(events, r.permits) {
				t.Errorf("no request needs %+v", r)
			}
		}
	}
	t.Logf("%d events: %v", len(events), requests)
}
