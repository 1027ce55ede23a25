package chart

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/test/machines/lab"
)

const (
	clusterRole = "ClusterRole /nametap-discovery"
	hooks       = "MutatingWebhookConfiguration /nametap-inject"
)

// TestExistingSecret checks that nametap-discovery serves the certificate of a Secret, with no right to
// Secrets and to the webhook.
func TestExistingSecret(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		all := h.render(`{discovery: {tls: {secret: own-tls}}, injection: {webhook: true, rootCert: own-root, webhookAnnotations: {cert-manager.io/inject-ca-from: mesh/own}}}`)
		pod := read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec
		if i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "tls" }); i < 0 || pod.Volumes[i].Secret.SecretName != "own-tls" {
			t.Errorf("volumes %+v", pod.Volumes)
		}
		args := strings.Join(pod.Containers[0].Args, " ")
		if !strings.Contains(args, "--tls-cert=/etc/nametap-tls/tls.crt --tls-key=/etc/nametap-tls/tls.key") || strings.Contains(args, "--tls-secret") {
			t.Errorf("arguments %s", args)
		}
		for _, role := range []string{clusterRole, "Role " + namespace + "/nametap-discovery"} {
			for _, rule := range read[rbacv1.Role](t, all, role).Rules {
				if rule.Resources[0] == "secrets" || rule.Resources[0] == "configmaps" && slices.Contains(rule.Verbs, "create") {
					t.Errorf("%s has %+v", role, rule)
				}
			}
		}
		if _, ok := all[clusterRole+"-webhook"]; ok {
			t.Error("a right to the webhook")
		}
		if got := read[admissionv1.MutatingWebhookConfiguration](t, all, hooks).Annotations["cert-manager.io/inject-ca-from"]; got != "mesh/own" {
			t.Errorf("annotation %q", got)
		}
		const pem = "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n"
		all = h.render(`{discovery: {tls: {secret: own-tls}}, injection: {webhook: true, rootCert: own-root, caBundle: "` + strings.ReplaceAll(pem, "\n", `\n`) + `"}}`)
		for _, hook := range read[admissionv1.MutatingWebhookConfiguration](t, all, hooks).Webhooks {
			if string(hook.ClientConfig.CABundle) != pem {
				t.Errorf("caBundle %q", hook.ClientConfig.CABundle)
			}
		}
	})
}

// TestFollowed checks that settings of nametap-discovery bring the rights that they need, and reach injection.
func TestFollowed(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		all := h.render(`{discovery: {settings: {tls-ca-configmap: own-root, clusters-namespace: clusters, cluster-id: east}}, injection: {clusterDomain: corp.example}}`)
		rules := read[rbacv1.ClusterRole](t, all, clusterRole).Rules
		if !slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool {
			return slices.Equal(r.ResourceNames, []string{"own-root"}) && slices.Contains(r.Verbs, "patch")
		}) {
			t.Errorf("no right to own-root in %+v", rules)
		}
		role := read[rbacv1.Role](t, all, "Role clusters/nametap-discovery-clusters")
		binding := read[rbacv1.RoleBinding](t, all, "RoleBinding clusters/nametap-discovery-clusters")
		if len(role.Rules) != 1 || binding.Subjects[0].Namespace != namespace || binding.RoleRef.Name != role.Name {
			t.Errorf("%+v, %+v", role, binding)
		}
		cfg := injection(t, all)
		if got, want := []string{cfg.RootCert, cfg.ClusterID, cfg.ClusterDomain}, []string{"own-root", "east", "corp.example"}; !slices.Equal(got, want) {
			t.Errorf("injection has %q, want %q", got, want)
		}
		if args := read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--cluster-domain=corp.example") {
			t.Errorf("arguments %q", args)
		}
		// istiod has other names.
		cfg = injection(t, h.render(`{discovery: {settings: {tls-ca-configmap: own-root, cluster-id: east}}, injection: {controlPlane: "istiod.istio-system.svc:15012"}}`))
		if diff := cmp.Diff([]string{"istio-ca-root-cert", ""}, []string{cfg.RootCert, cfg.ClusterID}); diff != "" {
			t.Error(diff)
		}
	})
}

// TestInjectedContainers checks the resources and the Secrets of injected pods.
func TestInjectedContainers(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		cfg := injection(t, h.render(`{injection: {resources: {requests: {cpu: null, memory: 64Mi}, limits: {memory: 256Mi, cpu: 1}}, imagePullSecrets: [own]}}`))
		want := inject.Resources{Requests: inject.Amounts{"cpu": "", "memory": "64Mi"}, Limits: inject.Amounts{"cpu": "1", "memory": "256Mi"}}
		if diff := cmp.Diff(want, cfg.Resources); diff != "" || !slices.Equal(cfg.ImagePullSecrets, []string{"own"}) {
			t.Errorf("%s\n%q", diff, cfg.ImagePullSecrets)
		}
	})
}

// TestContradictions checks that values that cannot work together are refused with a sentence that names one
// and says what to do.
func TestContradictions(t *testing.T) { // P9
	versions(t, func(h helm) {
		for values, sentence := range map[string]string{
			`discovery: {settings: {tls-cert: /c}}`:                                                 "discovery.settings.tls-cert stands beside the Secret that nametap-discovery makes: set discovery.tls.secret",
			`discovery: {settings: {tls-key: /c}}`:                                                  "discovery.settings.tls-key stands beside",
			`discovery: {tls: {secret: own}}`:                                                       "set injection.rootCert",
			`discovery: {settings: {tls-ca-configmap: ""}}`:                                         "set injection.rootCert",
			`discovery: {tls: {secret: nametap-discovery-tls}}`:                                     "give your Secret another name",
			`discovery: {tls: {secret: own}, settings: {tls-ca-configmap: a}}`:                      "discovery.settings.tls-ca-configmap is for the certificate that nametap-discovery makes",
			`discovery: {tls: {secret: own}}, injection: {rootCert: own, webhook: true}`:            "set injection.caBundle",
			`injection: {webhook: true, caBundle: "-----BEGIN CERTIFICATE-----\nMII="}`:             "leave one of them out",
			`injection: {webhook: true, webhookAnnotations: {cert-manager.io/inject-ca-from: a/b}}`: "set both or none",
			`discovery: {settings: {cluster-domain: a.example}}`:                                    "set injection.clusterDomain alone",
			`discovery: {settings: {cluster-id: a}}, injection: {clusterID: b}`:                     "set injection.clusterID alone",
			`discovery: {resources: {requests: {memory: 1G}}}`:                                      "discovery.resources.requests.memory is 1G, above its limit 512Mi: lower it, or raise discovery.resources.limits.memory",
			`discovery: {resources: {requests: {cpu: 1.5}, limits: {cpu: 1400m}}}`:                  "discovery.resources.requests.cpu is 1.5, above its limit 1400m",
			`discovery: {settings: {max-clients: 0}}`:                                               "max-clients",
			`injection: {resources: {limits: {memory: 16Mi}, requests: {memory: 8Mi}}}`:             "injection.resources.limits.memory is 16Mi, and the agent needs 32Mi",
			`injection: {resources: {requests: {memory: 1Gi}}}`:                                     "injection.resources.requests.memory is 1Gi, above its limit 192Mi",
			`discovery: {settings: {log-level: loud}}`:                                              "log-level",
		} {
			if _, err := h.template("{" + values + "}"); err == nil || !strings.Contains(err.Error(), sentence) {
				h.t.Errorf("%s: %v", values, err)
			}
		}
	})
}

// TestMonitors checks that a monitor selects the pods or the Service, and that its port is one of theirs.
func TestMonitors(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		type monitor struct {
			APIVersion, Kind string
			Metadata         metav1.ObjectMeta
			Spec             struct {
				Selector                       metav1.LabelSelector
				PodMetricsEndpoints, Endpoints []struct{ Port, Interval string }
			}
		}
		for kind, labels := range map[string]func(all objects) (map[string]string, string){
			"PodMonitor": func(all objects) (map[string]string, string) {
				pod := read[appsv1.Deployment](t, all, deployment).Spec.Template
				return pod.Labels, pod.Spec.Containers[0].Ports[2].Name
			},
			"ServiceMonitor": func(all objects) (map[string]string, string) {
				s := read[corev1.Service](t, all, service)
				return s.Labels, s.Spec.Ports[2].Name
			},
		} {
			all := h.render(`{discovery: {monitor: {kind: ` + kind + `, interval: 30s, labels: {release: prometheus}}}}`)
			m := read[monitor](t, all, kind+" "+namespace+"/nametap-discovery")
			got, port := labels(all)
			for name, value := range m.Spec.Selector.MatchLabels {
				if got[name] != value {
					t.Errorf("%s selects %s=%s of %v", kind, name, value, got)
				}
			}
			endpoints := slices.Concat(m.Spec.PodMetricsEndpoints, m.Spec.Endpoints)
			if len(endpoints) != 1 || endpoints[0].Port != port || endpoints[0].Interval != "30s" || m.Metadata.Labels["release"] != "prometheus" || len(m.Spec.Selector.MatchLabels) == 0 {
				t.Errorf("%+v, want port %s", m, port)
			}
		}
	})
}

// TestMonitorOfAgents checks that the PodMonitor finds the port of an injected agent, in every namespace, and no other.
func TestMonitorOfAgents(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		type podMonitor struct {
			APIVersion, Kind string
			Metadata         metav1.ObjectMeta
			Spec             struct {
				NamespaceSelector   struct{ Any bool }
				Selector            metav1.LabelSelector
				PodMetricsEndpoints []struct {
					Port, Interval string
					Relabelings    []struct {
						SourceLabels  []string
						Regex, Action string
					}
				}
			}
		}
		all := h.render(`{injection: {monitor: {kind: PodMonitor, interval: 30s, labels: {release: prometheus}}}}`)
		m := read[podMonitor](t, all, "PodMonitor "+namespace+"/nametap")
		endpoints := m.Spec.PodMetricsEndpoints
		if !m.Spec.NamespaceSelector.Any || len(m.Spec.Selector.MatchLabels)+len(m.Spec.Selector.MatchExpressions) != 0 || len(endpoints) != 1 || m.Metadata.Labels["release"] != "prometheus" {
			t.Fatalf("%+v", m)
		}
		manifest, _, err := inject.Manifest([]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: cart}\nspec: {containers: [{name: cart, image: cart}]}\n"), "shop", injection(t, all))
		if err != nil {
			t.Fatal(err)
		}
		var cart corev1.Pod
		if err := yaml.Unmarshal(manifest, &cart); err != nil {
			t.Fatal(err)
		}
		pod := cart.Spec
		i := slices.IndexFunc(pod.InitContainers, func(c corev1.Container) bool { return c.Name == endpoints[0].Relabelings[0].Regex })
		if i < 0 || len(pod.InitContainers[i].Ports) != 1 || pod.InitContainers[i].Ports[0].Name != endpoints[0].Port || endpoints[0].Interval != "30s" {
			t.Errorf("%+v does not find a port of %+v", endpoints, pod.InitContainers)
		}
		if r := endpoints[0].Relabelings[0]; r.Action != "keep" || !slices.Equal(r.SourceLabels, []string{"__meta_kubernetes_pod_container_name"}) {
			t.Errorf("%+v", r)
		}
		if _, ok := h.render(`{}`)["PodMonitor "+namespace+"/nametap"]; ok {
			t.Error("a PodMonitor by default")
		}
	})
}

// TestAccount checks that everything names one service account, also one that exists.
func TestAccount(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		all := h.render(`{discovery: {serviceAccount: {name: own, annotations: {a: b}}}, injection: {webhook: true}}`)
		if got := read[corev1.ServiceAccount](t, all, "ServiceAccount "+namespace+"/own").Annotations["a"]; got != "b" {
			t.Errorf("annotation %q", got)
		}
		all = h.render(`{discovery: {serviceAccount: {create: false, name: own}, settings: {clusters-namespace: c}}, injection: {webhook: true}}`)
		names := []string{read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec.ServiceAccountName}
		for key := range all {
			if kind, _, _ := strings.Cut(key, " "); kind == "RoleBinding" || kind == "ClusterRoleBinding" {
				names = append(names, read[rbacv1.RoleBinding](t, all, key).Subjects[0].Name)
			} else if kind == "ServiceAccount" {
				t.Errorf("%s, which exists", key)
			}
		}
		if want := slices.Repeat([]string{"own"}, 5); !slices.Equal(names, want) {
			t.Errorf("accounts %q, want %q", names, want)
		}
		if _, err := h.template(`{discovery: {serviceAccount: {create: false}}}`); err == nil || !strings.Contains(err.Error(), "set discovery.serviceAccount.name") {
			t.Error(err)
		}
	})
}

// TestNotes checks that the notes say what to do next, and that a name of a value in them is one.
func TestNotes(t *testing.T) { // P9
	h := helm{t, lab.Peer(t, "helm4")} // Helm 3 needs a cluster for notes
	for values, want := range map[string][]string{
		"discovery.enabled=true":  {"rollout status deployment/nametap-discovery", "set image.registry", "nametap-discovery:" + version.Release(), "nametap inject --config", "--set injection.webhook=true", "injection.mode=resolv", "--take-ownership"},
		"injection.webhook=true":  {"kubectl label namespace NAMESPACE nametap.dev/inject=enabled", "rollout restart"},
		"discovery.enabled=false": {"nametap inject --config"},
	} {
		stdout, stderr, err := h.run("install", "nametap", chart, "--namespace", namespace, "--dry-run=client", "--set", values)
		if err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		_, notes, _ := strings.Cut(stdout, "NOTES:\n")
		for _, text := range want {
			if !strings.Contains(notes, text) {
				t.Errorf("%s: %q is not in:\n%s", values, text, notes)
			}
		}
		for line := range strings.Lines(notes) {
			if len(line) > 130 {
				t.Errorf("a line has %d characters: %s", len(line), line)
			}
		}
	}
}
