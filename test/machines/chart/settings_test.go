package chart

import (
	"fmt"
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
)

const hooks = "MutatingWebhookConfiguration /nametap-inject"

// TestCertManager checks that cert-manager makes the Secret that the pods mount, for the names of the Service, and writes the
// caBundle; and that pods get more root certificates than its own while there are two.
func TestCertManager(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		type certificate struct {
			APIVersion, Kind string
			Metadata         metav1.ObjectMeta
			Spec             struct {
				SecretName, CommonName, Duration string
				IsCA                             bool
				DNSNames, Usages                 []string
				PrivateKey, IssuerRef            map[string]any
			}
		}
		all := h.render(`{discovery: {tls: {certManager: true}}, injection: {webhook: true, clusterDomain: corp.example, extraRoots: "-----BEGIN CERTIFICATE-----\nMII="}}`)
		c := read[certificate](t, all, "Certificate "+namespace+"/nametap-discovery-cert")
		names := []string{"nametap-discovery." + namespace, "nametap-discovery." + namespace + ".svc", "nametap-discovery." + namespace + ".svc.corp.example"}
		if diff := cmp.Diff(names, c.Spec.DNSNames); diff != "" || c.Spec.SecretName != read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec.Volumes[1].Secret.SecretName {
			t.Errorf("%+v %s", c, diff)
		}
		if issuer := all["Issuer "+namespace+"/"+c.Spec.IssuerRef["name"].(string)]; issuer == nil { //nolint:forcetypeassert // the chart's
			t.Errorf("no issuer %v", c.Spec.IssuerRef)
		}
		if got := read[admissionv1.MutatingWebhookConfiguration](t, all, hooks).Annotations["cert-manager.io/inject-ca-from"]; got != namespace+"/nametap-discovery-cert" {
			t.Errorf("annotation %q", got)
		}
		if got, want := injection(t, all).RootCAFiles, []string{"/etc/nametap-tls/ca.crt", "/etc/nametap-inject/extra-roots.pem"}; !slices.Equal(got, want) {
			t.Errorf("files %q, want %q", got, want)
		}
		if text := read[corev1.ConfigMap](t, all, settings).Data["extra-roots.pem"]; !strings.HasPrefix(text, "-----BEGIN CERTIFICATE-----\nMII") {
			t.Errorf("extra roots %q", text)
		}
	})
}

// TestExistingSecret checks that nametap-discovery serves the certificate of a Secret, and that the webhook gets the
// authority from cert-manager or the value.
func TestExistingSecret(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		all := h.render(`{discovery: {tls: {secret: own-tls}}, injection: {webhook: true, webhookAnnotations: {cert-manager.io/inject-ca-from: mesh/own}}}`)
		pod := read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec
		if i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == "tls" }); i < 0 || pod.Volumes[i].Secret.SecretName != "own-tls" {
			t.Errorf("volumes %+v", pod.Volumes)
		}
		args := strings.Join(pod.Containers[0].Args, " ")
		if !strings.Contains(args, "--tls-cert=/etc/nametap-tls/tls.crt --tls-key=/etc/nametap-tls/tls.key") {
			t.Errorf("arguments %s", args)
		}
		if got := read[admissionv1.MutatingWebhookConfiguration](t, all, hooks).Annotations["cert-manager.io/inject-ca-from"]; got != "mesh/own" {
			t.Errorf("annotation %q", got)
		}
		const pem = "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n"
		all = h.render(`{discovery: {tls: {secret: own-tls}}, injection: {webhook: true, caBundle: "` + strings.ReplaceAll(pem, "\n", `\n`) + `"}}`)
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
		all := h.render(`{discovery: {settings: {clusters-namespace: clusters, cluster-id: east}}, injection: {clusterDomain: corp.example}}`)
		role := read[rbacv1.Role](t, all, "Role clusters/nametap-discovery-clusters")
		binding := read[rbacv1.RoleBinding](t, all, "RoleBinding clusters/nametap-discovery-clusters")
		if len(role.Rules) != 1 || binding.Subjects[0].Namespace != namespace || binding.RoleRef.Name != role.Name {
			t.Errorf("%+v, %+v", role, binding)
		}
		cfg := injection(t, all)
		if got, want := []string{cfg.ClusterID, cfg.ClusterDomain}, []string{"east", "corp.example"}; !slices.Equal(got, want) {
			t.Errorf("injection has %q, want %q", got, want)
		}
		if args := read[appsv1.Deployment](t, all, deployment).Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--cluster-domain=corp.example") {
			t.Errorf("arguments %q", args)
		}
		// istiod has other names.
		cfg = injection(t, h.render(`{discovery: {settings: {cluster-id: east}}, injection: {controlPlane: "istiod.istio-system.svc:15012"}}`))
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

// TestMonitors checks that monitors select the pods, the Service, or the agents of every namespace by their container, and
// that their ports are there.
func TestMonitors(t *testing.T) { // P9
	versions(t, func(h helm) {
		t := h.t
		type endpoint struct {
			Port, Interval string
			Relabelings    []struct {
				SourceLabels  []string
				Regex, Action string
			}
		}
		type monitor struct {
			APIVersion, Kind string
			Metadata         metav1.ObjectMeta
			Spec             struct {
				NamespaceSelector              struct{ Any bool }
				Selector                       metav1.LabelSelector
				PodMetricsEndpoints, Endpoints []endpoint
			}
		}
		check := func(key, values string, labels map[string]string, port string) endpoint {
			t.Helper()
			m := read[monitor](t, h.render(values), key)
			for name, value := range m.Spec.Selector.MatchLabels {
				if labels[name] != value {
					t.Errorf("%s selects %s=%s of %v", key, name, value, labels)
				}
			}
			endpoints := slices.Concat(m.Spec.PodMetricsEndpoints, m.Spec.Endpoints)
			if len(endpoints) != 1 || endpoints[0].Port != port || endpoints[0].Interval != "30s" || m.Metadata.Labels["release"] != "prometheus" || len(m.Spec.Selector.MatchLabels) == 0 != m.Spec.NamespaceSelector.Any {
				t.Errorf("%+v, want port %s", m, port)
			}
			return endpoints[0]
		}
		all := h.render("{}")
		pod, svc := read[appsv1.Deployment](t, all, deployment).Spec.Template, read[corev1.Service](t, all, service)
		const values = "monitor: {kind: %s, interval: 30s, labels: {release: prometheus}}"
		check("PodMonitor "+namespace+"/nametap-discovery", "{discovery: {"+fmt.Sprintf(values, "PodMonitor")+"}}", pod.Labels, pod.Spec.Containers[0].Ports[2].Name)
		check("ServiceMonitor "+namespace+"/nametap-discovery", "{discovery: {"+fmt.Sprintf(values, "ServiceMonitor")+"}}", svc.Labels, svc.Spec.Ports[2].Name)
		text, _, err := inject.Manifest([]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: cart}\nspec: {containers: [{name: cart, image: cart}]}\n"), "shop", injection(t, all))
		var cart corev1.Pod
		if err == nil {
			err = yaml.Unmarshal(text, &cart)
		}
		if err != nil {
			t.Fatal(err)
		}
		agent := cart.Spec.InitContainers[0]
		if e := check("PodMonitor "+namespace+"/nametap", "{injection: {"+fmt.Sprintf(values, "PodMonitor")+"}}", nil, agent.Ports[0].Name); e.Relabelings[0].Regex != agent.Name || e.Relabelings[0].Action != "keep" || e.Relabelings[0].SourceLabels[0] != "__meta_kubernetes_pod_container_name" {
			t.Errorf("%+v, want the container %s", e, agent.Name)
		}
		if _, ok := all["PodMonitor "+namespace+"/nametap"]; ok {
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
		if want := slices.Repeat([]string{"own"}, 3); !slices.Equal(names, want) {
			t.Errorf("accounts %q, want %q", names, want)
		}
		if _, err := h.template(`{discovery: {serviceAccount: {create: false}}}`); err == nil || !strings.Contains(err.Error(), "set discovery.serviceAccount.name") {
			t.Error(err)
		}
	})
}
