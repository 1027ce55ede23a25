package deploy

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/inject/webhook"
)

const (
	// system is the namespace of nametap-discovery.
	system = "nametap-system"
	// proxyConfig is the annotation of Istio's settings.
	proxyConfig = "proxy.istio.io/config"
)

// objects are the objects of a manifest.
type objects struct {
	pod            corev1.Pod
	deployment     appsv1.Deployment
	service        corev1.Service
	namespace      corev1.Namespace
	account        corev1.ServiceAccount
	clusterRole    rbacv1.ClusterRole
	clusterBinding rbacv1.ClusterRoleBinding
	budget         policyv1.PodDisruptionBudget
	network        networkingv1.NetworkPolicy
	configMap      corev1.ConfigMap
	webhook        admissionregistrationv1.MutatingWebhookConfiguration
}

// load decodes a manifest strictly: an unknown field fails the test.
func load(t *testing.T, variant string) objects {
	t.Helper()
	var all objects
	for document := range strings.SplitSeq(read(t, "kubernetes/"+variant+".yaml"), "\n---\n") {
		var kind struct{ Kind string }
		err := yaml.Unmarshal([]byte(document), &kind)
		into := map[string]any{
			"Pod": &all.pod, "Deployment": &all.deployment, "Service": &all.service, "Namespace": &all.namespace,
			"ServiceAccount": &all.account, "ClusterRole": &all.clusterRole, "ClusterRoleBinding": &all.clusterBinding,
			"PodDisruptionBudget": &all.budget, "NetworkPolicy": &all.network,
			"ConfigMap": &all.configMap, "MutatingWebhookConfiguration": &all.webhook,
		}[kind.Kind]
		if err == nil {
			err = yaml.UnmarshalStrict([]byte(document), into)
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", variant, err, document)
		}
	}
	return all
}

// A fact is something of a manifest that follows from a setting, or from another part of the manifests.
type fact struct {
	what      string
	want, got any
}

func agree(t *testing.T, facts ...fact) {
	t.Helper()
	for _, f := range facts {
		if diff := cmp.Diff(f.want, f.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", f.what, diff)
		}
	}
}

// rights are the rights of a container. A container of root says so, because kubelet would not start it in a pod with
// runAsNonRoot otherwise. A user of -1 is that of the image.
func rights(user int64, capabilities ...corev1.Capability) *corev1.SecurityContext {
	c := &corev1.SecurityContext{
		RunAsNonRoot: new(user != 0), AllowPrivilegeEscalation: new(false), ReadOnlyRootFilesystem: new(true),
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: capabilities},
	}
	if user >= 0 {
		c.RunAsUser, c.RunAsGroup = &user, &user
	}
	return c
}

// port returns the number of a port of a container.
func port(c corev1.Container, name string) int32 {
	for _, p := range c.Ports {
		if p.Name == name {
			return p.ContainerPort
		}
	}
	return 0
}

// mounted fails the test unless every volume is mounted, every mount has a volume, and memory is limited.
func mounted(t *testing.T, spec corev1.PodSpec) {
	t.Helper()
	var volumes, mounts []string
	for _, v := range spec.Volumes {
		volumes = append(volumes, v.Name)
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, m := range c.VolumeMounts {
			mounts = append(mounts, m.Name)
		}
		if c.SecurityContext != nil && c.Resources.Limits.Memory().IsZero() { // not the application
			t.Errorf("%s has no limit of memory", c.Name)
		}
	}
	if diff := cmp.Diff(volumes, mounts, cmpopts.SortSlices(strings.Compare)); diff != "" {
		t.Errorf("volumes and mounts (-volumes +mounts):\n%s", diff)
	}
}

// TestPods checks that the agent is a sidecar without capabilities before the container of the rules, which has two;
// that nothing delays the start, and that kubelet restarts the container only after the supervisor, which kills a hung
// agent after at most 20 s; and that the token and the root certificate are those of the control plane.
func TestPods(t *testing.T) { // I0, K15
	t.Parallel()
	for variant, rootCert := range map[string]string{"istiod": "istio-ca-root-cert", "discovery": "nametap-ca-root-cert"} {
		pod := load(t, variant).pod
		if len(pod.Spec.InitContainers) != 2 {
			t.Fatalf("%s: %d init containers, want two: the agent and the rules", variant, len(pod.Spec.InitContainers))
		}
		agent, capture := pod.Spec.InitContainers[0], pod.Spec.InitContainers[1]
		settings, mounts, volumes := map[string]string{}, map[string]string{}, map[string]corev1.VolumeSource{}
		for _, variable := range agent.Env {
			settings[variable.Name] = variable.Value
		}
		for _, m := range agent.VolumeMounts {
			mounts[m.Name] = m.MountPath
		}
		for _, v := range pod.Spec.Volumes {
			volumes[v.Name] = v.VolumeSource
		}
		token := volumes["token"].Projected.Sources[0].ServiceAccountToken
		wait, err := time.ParseDuration(settings["NAMETAP_CAPTURE_WAIT"])
		agree(t,
			fact{"rights of the agent", rights(1337), agent.SecurityContext},
			fact{"rights of the rules", rights(0, "NET_ADMIN", "NET_RAW"), capture.SecurityContext},
			fact{"the restart of the agent", new(corev1.ContainerRestartPolicyAlways), agent.RestartPolicy},
			fact{"the restart of the rules", (*corev1.ContainerRestartPolicy)(nil), capture.RestartPolicy},
			fact{"arguments", []string{"agent", "--supervise", "capture", "apply"}, slices.Concat(agent.Args, capture.Args)},
			fact{"settings of the agent and of the rules", agent.Env, capture.Env},
			fact{"the wait for the agent", true, err == nil && wait >= 10*time.Second},
			fact{"the drain", "0s", settings["NAMETAP_DRAIN"]},
			// The measured memory with 100,000 hosts, and the binary.
			fact{"enough memory", true, agent.Resources.Limits.Memory().Cmp(resource.MustParse("171Mi")) >= 0},
			fact{"seccomp", corev1.SeccompProfileTypeRuntimeDefault, pod.Spec.SecurityContext.SeccompProfile.Type},
			fact{"token for the API server", new(false), pod.Spec.AutomountServiceAccountToken},
			fact{"the startup probe", (*corev1.Probe)(nil), agent.StartupProbe},
			fact{"paths", []string{"/var/run/secrets/tokens/istio-token", "/var/run/secrets/istio"},
				[]string{filepath.Join(mounts["token"], token.Path), mounts["root-cert"]}},
			fact{"the audience", "istio-ca", token.Audience},
			fact{"the root certificate", rootCert, volumes["root-cert"].ConfigMap.Name},
		)
		for path, probe := range map[string]*corev1.Probe{"/healthz/ready": agent.ReadinessProbe, "/healthz/live": agent.LivenessProbe} {
			agree(t, fact{variant + path, []any{path, int32(15020), int32(0)},
				[]any{probe.HTTPGet.Path, port(agent, probe.HTTPGet.Port.StrVal), probe.InitialDelaySeconds}})
		}
		live := agent.LivenessProbe
		if least, most := live.PeriodSeconds*(live.FailureThreshold-1), live.PeriodSeconds*live.FailureThreshold; least < 22 || most > 30 {
			t.Errorf("kubelet restarts the container after %d to %d s", least, most)
		}
		mounted(t, pod.Spec)
	}
}

// TestDiscovery checks that the parts of discovery.yaml refer to each other; that the replicas stay available, and keep
// no node from being drained; and that the roles name only what is needed (test/machines/interop checks that each rule is).
func TestDiscovery(t *testing.T) { // D20
	t.Parallel()
	all := load(t, "discovery")
	pod := all.deployment.Spec.Template
	server, labels := pod.Spec.Containers[0], pod.Labels
	mounted(t, pod.Spec)
	for _, o := range []metav1.Object{&all.account, &all.deployment, &all.budget, &all.service, &all.network, &all.configMap} {
		agree(t, fact{"the namespace of " + o.GetName(), system, o.GetNamespace()})
	}
	for _, constraint := range pod.Spec.TopologySpreadConstraints {
		agree(t, fact{"labels of spread pods", labels, constraint.LabelSelector.MatchLabels})
	}
	for _, volume := range pod.Spec.Volumes { // the rules of `kubectl drain` and Cluster Autoscaler
		agree(t, fact{"what keeps a node from being drained", corev1.VolumeSource{ConfigMap: volume.ConfigMap, Secret: volume.Secret}, volume.VolumeSource})
	}
	ports, served, admitted := map[string]int32{}, map[string]int32{}, map[string]int32{}
	for _, p := range server.Ports {
		ports[p.Name] = p.ContainerPort
	}
	for _, p := range all.service.Spec.Ports {
		served[p.TargetPort.StrVal] = p.Port
	}
	for _, rule := range all.network.Spec.Ingress {
		for _, p := range rule.Ports {
			admitted[p.Port.StrVal] = ports[p.Port.StrVal]
		}
	}
	changed, read := map[string][]string{}, []string{}
	for _, rule := range all.clusterRole.Rules {
		if slices.Contains(rule.Verbs, "update") || slices.Contains(rule.Verbs, "patch") {
			changed[rule.Resources[0]] = rule.ResourceNames
		}
		read = append(append(read, rule.Resources...), rule.Verbs...)
	}
	subject := []rbacv1.Subject{{Kind: "ServiceAccount", Name: all.account.Name, Namespace: system}}
	agree(t,
		fact{"the rights", rights(-1), server.SecurityContext},
		fact{"the level of the namespace", "restricted", all.namespace.Labels["pod-security.kubernetes.io/enforce"]},
		fact{"the namespace", system, all.namespace.Name},
		fact{"replicas that stay", []any{int32(2), intstr.FromInt32(0), intstr.FromInt32(1)},
			[]any{*all.deployment.Spec.Replicas, *all.deployment.Spec.Strategy.RollingUpdate.MaxUnavailable, *all.budget.Spec.MaxUnavailable}},
		fact{"labels of the Deployment", labels, all.deployment.Spec.Selector.MatchLabels},
		fact{"labels of the Service", labels, all.service.Spec.Selector},
		fact{"labels of the budget", labels, all.budget.Spec.Selector.MatchLabels},
		fact{"labels of the NetworkPolicy", labels, all.network.Spec.PodSelector.MatchLabels},
		fact{"ports of the Service", ports, served},
		fact{"ports of the NetworkPolicy", ports, admitted},
		fact{"ports of probes and metrics", []any{int32(15014), int32(15014), "15014"},
			[]any{port(server, server.ReadinessProbe.HTTPGet.Port.StrVal), port(server, server.LivenessProbe.HTTPGet.Port.StrVal), pod.Annotations["prometheus.io/port"]}},
		fact{"the address in the pod", true, strings.Contains(all.pod.Annotations[proxyConfig], all.service.Name+"."+system+".svc:15012")},
		fact{"the ClusterRoleBinding", subject, all.clusterBinding.Subjects},
		fact{"the ClusterRole", all.clusterRole.Name, all.clusterBinding.RoleRef.Name},
		fact{"the account", all.account.Name, pod.Spec.ServiceAccountName},
		fact{"what may be changed", map[string][]string{}, changed},
		fact{"too many rights", false, slices.ContainsFunc(read, func(s string) bool {
			return s == "*" || s == "pods" || s == "secrets" || s == "mutatingwebhookconfigurations"
		})},
		fact{"the setting of the certificate", true, slices.Contains(server.Args, "--tls-cert=/etc/nametap-tls/tls.crt")},
	)
}

// TestWebhookManifest checks webhook.yaml against the rest: the Service and its port, the paths that nametap-discovery
// serves, the namespaces that are ignored, and that it leaves caBundle to `nametap-discovery certificates`. The right to
// change the webhook is power over the cluster, so nametap-discovery has none.
func TestWebhookManifest(t *testing.T) { // I9
	t.Parallel()
	all, hooks := load(t, "discovery"), load(t, "webhook")
	args := all.deployment.Spec.Template.Spec.Containers[0].Args
	for i, path := range []string{webhook.PathNamespace, webhook.PathPod} {
		hook := hooks.webhook.Webhooks[i]
		ignored := hook.NamespaceSelector.MatchExpressions[len(hook.NamespaceSelector.MatchExpressions)-1]
		agree(t,
			fact{"the Service", admissionregistrationv1.WebhookClientConfig{Service: &admissionregistrationv1.ServiceReference{
				Name: all.service.Name, Namespace: system, Port: new(int32(15017)), Path: &path}}, hook.ClientConfig},
			fact{"the policies", []any{admissionregistrationv1.SideEffectClassNone, admissionregistrationv1.Fail, admissionregistrationv1.IfNeededReinvocationPolicy},
				[]any{*hook.SideEffects, *hook.FailurePolicy, *hook.ReinvocationPolicy}},
			fact{"ignored namespaces", metav1.LabelSelectorRequirement{Key: "kubernetes.io/metadata.name", Operator: metav1.LabelSelectorOpNotIn, Values: inject.DefaultConfig().IgnoredNamespaces}, ignored},
			fact{"conditions", hooks.webhook.Webhooks[0].MatchConditions, hook.MatchConditions},
		)
	}
	settings, err := inject.ParseConfig([]byte(all.configMap.Data["inject.yaml"]))
	if err != nil {
		t.Fatal(err)
	}
	agree(t,
		fact{"the control plane", all.service.Name + "." + system + ".svc:15012", settings.ControlPlane},
		fact{"arguments", true, slices.Contains(args, "--inject-config=/etc/nametap-inject/inject.yaml") && slices.Contains(args, "--inject-addr=:15017")},
		fact{"the root certificates of pods", []string{"/etc/nametap-tls/ca.crt"}, settings.RootCAFiles},
	)
}

// TestInjectedEqualsManifest injects the application of each manifest, and compares
// the pod with the manifest's pod. So a change of one needs the same change of the other.
func TestInjectedEqualsManifest(t *testing.T) { // I1
	t.Parallel()
	for variant, rootCert := range map[string]string{"istiod": "istio-ca-root-cert", "discovery": "nametap-ca-root-cert"} {
		want := load(t, variant).pod
		app := want.DeepCopy()
		app.APIVersion, app.Kind = "v1", "Pod"
		app.Spec.InitContainers, app.Spec.Volumes = nil, nil
		text, err := yaml.Marshal(app)
		if err != nil {
			t.Fatal(err)
		}
		cfg := inject.DefaultConfig()
		cfg.RootCert, cfg.ControlPlane = rootCert, "other:15012"
		injected, _, err := inject.Manifest(text, "default", cfg)
		if err != nil {
			t.Fatal(err)
		}
		var got corev1.Pod
		if err := yaml.UnmarshalStrict(injected, &got); err != nil {
			t.Fatal(err)
		}
		agree(t, fact{variant, alike(want.Spec), alike(got.Spec)})
	}
}

// alike returns a specification without two differences that have a reason. The manifest sets the
// profile of seccomp for the whole pod; injection changes only its own containers. Names of injected
// volumes begin with nametap-, because the application may have others.
func alike(spec corev1.PodSpec) corev1.PodSpec {
	spec = *spec.DeepCopy()
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if c.SecurityContext.SeccompProfile == nil {
			c.SecurityContext.SeccompProfile = spec.SecurityContext.SeccompProfile
		}
		for j := range c.VolumeMounts {
			c.VolumeMounts[j].Name = strings.TrimPrefix(c.VolumeMounts[j].Name, "nametap-")
		}
	}
	for i := range spec.Volumes {
		spec.Volumes[i].Name = strings.TrimPrefix(spec.Volumes[i].Name, "nametap-")
	}
	slices.SortFunc(spec.Volumes, func(a, b corev1.Volume) int { return strings.Compare(a.Name, b.Name) })
	return spec
}

// TestCustomResources checks the names and versions of the custom resources. The API server checks
// the rest in test/machines/interop.
func TestCustomResources(t *testing.T) {
	t.Parallel()
	var got []string
	for document := range strings.SplitSeq(read(t, "kubernetes/crds.yaml"), "\n---\n") {
		var definition struct {
			Metadata metav1.ObjectMeta
			Spec     struct {
				Names    struct{ Kind string }
				Versions []struct {
					Name    string
					Storage bool
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &definition); err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintln(definition.Spec.Names.Kind, definition.Metadata.Name, definition.Spec.Versions))
	}
	const versions = " [{v1 true} {v1beta1 false} {v1alpha3 false}]\n"
	agree(t, fact{"custom resources", []string{"ServiceEntry serviceentries.networking.istio.io" + versions, "Sidecar sidecars.networking.istio.io" + versions}, got})
}

// TestChartSchema checks that the schema of the chart has exactly the keys of the values. test/machines/chart has the
// tests that need the commands of Helm.
func TestChartSchema(t *testing.T) { // P9
	t.Parallel()
	var values, schema map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "chart/values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(read(t, "chart/values.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	delete(schema["properties"].(map[string]any), "global") // of a parent chart
	sameKeys(t, "", values, schema)
}

// sameKeys compares the keys of values with the keys in their schema.
func sameKeys(t *testing.T, path string, values, schema map[string]any) {
	t.Helper()
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return // its keys are names
	}
	agree(t, fact{"keys of " + path, slices.Sorted(maps.Keys(properties)), slices.Sorted(maps.Keys(values))})
	for key, value := range values {
		child, isMap := value.(map[string]any)
		described, isObject := properties[key].(map[string]any)
		if isMap && isObject {
			sameKeys(t, path+"/"+key, child, described)
		}
	}
}
