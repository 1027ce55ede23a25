package interop

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

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
func audited(c *lab.Cluster) []auditEvent {
	c.TB.Helper()
	var all []auditEvent
	for line := range strings.Lines(c.Read("audit.log")) {
		var e auditEvent
		if !strings.HasSuffix(line, "\n") {
			continue // it is being written
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			c.TB.Fatalf("%v: %s", err, line)
		}
		if e.User.Username == "system:serviceaccount:"+discoverySystem+":nametap-discovery" {
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

// TestRoles runs two replicas of nametap-discovery with the rights of the manifest, lets them do all that
// they can, and compares the log of the API server with the rules: no request was forbidden, every rule
// was used, and Pods were not requested.
func TestRoles(t *testing.T) { // D7, D20
	c := lab.NewCluster(t)
	audit := []string{"--audit-policy-file", c.Write("audit.yaml", auditPolicy), "--audit-log-path", c.Path("audit.log")}
	c.Boot(audit...)
	rules, args := readManifests(c)
	c.Kubectl("apply", "-f", manifest("discovery.yaml"), "-f", manifest("webhook.yaml"))
	c.Apply("apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n")
	certify(c, "--webhook", "--pods-in", "shop")
	c.Apply(service("web", "10.96.1.1"))
	first, second := startReplica(c, args, "160"), startReplica(c, args, "170")
	h := newHost(c, dual)
	// An agent connects to a replica with TLS, a token of its service account and the published root certificate.
	agent := func(name string, r replica) *lab.Agent {
		return h.agent(name, "shop", "--xds-addr", h.address(r.tls), "--xds-server-name", discoveryName, "--service-account", "default",
			"--xds-root-ca", h.Write("root-cert.pem", root(c, "shop", rootConfigMap)), "--xds-token-file", h.project(token(c, "shop", "default", audience)))
	}
	a := agent("one", first)
	a.Has("web.shop.svc.cluster.local", "10.96.1.1")

	customResources(t, c, a)

	// An API server that cannot stream lists, as before Kubernetes 1.34. While it starts, before it knows
	// the roles, it would forbid the requests of replicas.
	for _, r := range []replica{first, second} {
		r.End(syscall.SIGTERM)
	}
	c.APIServer.End(syscall.SIGKILL)
	c.StartAPIServer(append(audit, "--feature-gates=WatchList=false")...)
	third := startReplica(c, args, "180")
	a.End(syscall.SIGTERM)
	agent("two", third).Has("new.example.com", "198.51.100.2")
	compareAudit(t, c, rules)
}

// webOfSet is the host of the ServiceImport web.
const webOfSet = "web.shop.svc.clusterset.local"

// webImport is a ServiceImport with an address.
const webImport = `apiVersion: multicluster.x-k8s.io/v1beta1
kind: ServiceImport
metadata: {name: web, namespace: shop}
spec: {type: ClusterSetIP, ips: [10.96.112.1], ports: [{name: http, port: 80, protocol: TCP}]}
`

// importDefinition is the custom resource definition of ServiceImports.
const importDefinition = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: serviceimports.multicluster.x-k8s.io, annotations: {api-approved.kubernetes.io: "https://github.com/kubernetes-sigs/mcs-api"}}
spec:
  group: multicluster.x-k8s.io
  scope: Namespaced
  names: {plural: serviceimports, singular: serviceimport, kind: ServiceImport}
  versions:
  - {name: v1beta1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}
`

// customResources follows the ways to install the custom resources: the project's where there are
// none, again, and Istio's afterwards. The agent's table has the ServiceEntries.
func customResources(t *testing.T, c *lab.Cluster, a *lab.Agent) {
	t.Helper()
	t.Logf("%s", c.Kubectl("create", "-f", manifest("crds.yaml")))
	const definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/serviceentries.networking.istio.io"
	version := func() string {
		var o struct {
			Metadata struct{ ResourceVersion string }
		}
		c.Get(definition, &o)
		return o.Metadata.ResourceVersion
	}
	wait.Until(t, "ServiceEntries are served", func() bool {
		return c.Do(http.MethodGet, "/apis/networking.istio.io/v1/serviceentries", nil, nil) == nil
	})
	c.Apply(importDefinition)
	c.Apply(webImport)
	a.Has(webOfSet, "10.96.112.1")
	c.Remove(webImport)
	// A field that only Istio knows stays.
	entry := strings.Replace(entryOf("new.example.com", "198.51.100.2"), "resolution: NONE", "resolution: NONE, location: MESH_EXTERNAL", 1)
	c.Kubectl("apply", "-f", c.Write("entry.yaml", entry))
	a.Has("new.example.com", "198.51.100.2")
	c.Apply("apiVersion: networking.istio.io/v1\nkind: Sidecar\nmetadata: {name: default, namespace: shop}\nspec: {egress: [{hosts: [./web.shop.svc.cluster.local]}]}\n")
	wait.Until(t, "the Sidecar hides it", func() bool { return len(a.Table()) == 1 })
	c.Kubectl("delete", "--namespace=shop", "sidecar", "default")

	before := version()
	output, err := c.TryKubectl("create", "-f", manifest("crds.yaml"))
	if err == nil || strings.Count(output, "already exists") != 2 || version() != before {
		t.Errorf("kubectl create where there are custom resources: %v, version %s, before %s\n%s", err, version(), before, output)
	}
	c.ApplyIstio() // as istioctl does
	before = version()
	if output, err := c.TryKubectl("create", "-f", manifest("crds.yaml")); err == nil || version() != before {
		t.Errorf("kubectl create has changed the custom resources of Istio: %v\n%s", err, output)
	}
	var kept struct{ Spec struct{ Location string } }
	c.Get("/apis/networking.istio.io/v1/namespaces/shop/serviceentries/new", &kept)
	if kept.Spec.Location != "MESH_EXTERNAL" {
		t.Errorf("the ServiceEntry is %+v", kept)
	}
	c.Apply(strings.ReplaceAll(entryOf("more.example.com", "198.51.100.3"), "name: new", "name: more"))
	a.Has("more.example.com", "198.51.100.3")
	a.Has("new.example.com", "198.51.100.2")
}

// compareAudit compares the log of the API server with the rules.
func compareAudit(t *testing.T, c *lab.Cluster, rules []rbacv1.PolicyRule) {
	t.Helper()
	events := audited(c)
	for _, e := range events {
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
	t.Logf("%d events", len(events))
}
