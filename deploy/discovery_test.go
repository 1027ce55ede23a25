package deploy

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// system is the namespace of nametap-discovery.
const system = "nametap-system"

// TestDiscovery checks that nametap-discovery accepts its arguments and serves the Kubernetes API, that
// its replicas stay available, and that its address is the one in the pod's settings.
func TestDiscovery(t *testing.T) {
	t.Parallel()
	all := load(t, "discovery")
	pod := all.deployment.Spec.Template
	server := pod.Spec.Containers[0]
	confined(t, server, ofImage)
	mounted(t, pod.Spec)
	for _, volume := range pod.Spec.Volumes { // the rules of `kubectl drain` and Cluster Autoscaler
		if volume.EmptyDir != nil || volume.HostPath != nil {
			t.Errorf("the volume %s keeps the node from being drained", volume.Name)
		}
	}
	a := fakekube.Start(t)
	a.Put(fakekube.Services, "apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: default}\nspec: {clusterIP: 10.96.0.1}\n")
	args := append([]string{"table"}, append(slices.Clone(server.Args), "--kubeconfig="+a.Kubeconfig(), "--state-dir=")...)
	if table := output(t, command(t, nil, "nametap-discovery", args...)); !strings.Contains(table, "web.default.svc.cluster.local") {
		t.Errorf("no web in %s", table)
	}
	if r := all.deployment.Spec.Strategy.RollingUpdate; *all.deployment.Spec.Replicas != 2 || *r.MaxUnavailable != intstr.FromInt32(0) || all.budget.Spec.MaxUnavailable.IntVal != 1 {
		t.Errorf("the replicas do not stay available: %d, %v, %v", *all.deployment.Spec.Replicas, r, all.budget.Spec)
	}
	address := all.service.Name + "." + system + ".svc:15012"
	if !strings.Contains(all.pod.Annotations[proxyConfig], address) {
		t.Errorf("%s is not in %s", address, all.pod.Annotations[proxyConfig])
	}
	for _, probe := range []*corev1.Probe{server.ReadinessProbe, server.LivenessProbe} {
		if containerPort(server, probe) != 15014 || pod.Annotations["prometheus.io/port"] != "15014" {
			t.Errorf("probe %v, metrics %v", probe, pod.Annotations)
		}
	}
	if level := all.namespace.Labels["pod-security.kubernetes.io/enforce"]; level != "restricted" || all.namespace.Name != system {
		t.Errorf("the namespace %s has the Pod Security level %q", all.namespace.Name, level)
	}
	for _, o := range []metav1.Object{&all.account, &all.role, &all.binding, &all.deployment, &all.budget, &all.service, &all.policy} {
		if o.GetNamespace() != system {
			t.Errorf("%s is in the namespace %q", o.GetName(), o.GetNamespace())
		}
	}
}

// TestDiscoverySelectors checks that everything that selects pods selects the Deployment's pods,
// and that the ports of the Service and of the NetworkPolicy are ports of these pods.
func TestDiscoverySelectors(t *testing.T) {
	t.Parallel()
	all := load(t, "discovery")
	pod := all.deployment.Spec.Template
	selectors := []map[string]string{
		all.deployment.Spec.Selector.MatchLabels, all.service.Spec.Selector, all.budget.Spec.Selector.MatchLabels, all.policy.Spec.PodSelector.MatchLabels,
	}
	for _, constraint := range pod.Spec.TopologySpreadConstraints {
		selectors = append(selectors, constraint.LabelSelector.MatchLabels)
	}
	for _, selector := range selectors {
		if diff := cmp.Diff(selector, pod.Labels); diff != "" {
			t.Errorf("a selector (-) and the labels of the pods (+):\n%s", diff)
		}
	}
	ports := map[string]int32{}
	for _, port := range pod.Spec.Containers[0].Ports {
		ports[port.Name] = port.ContainerPort
	}
	inService, admitted := map[string]int32{}, []string{}
	for _, port := range all.service.Spec.Ports {
		inService[port.TargetPort.StrVal] = port.Port
	}
	for _, rule := range all.policy.Spec.Ingress {
		for _, port := range rule.Ports {
			admitted = append(admitted, port.Port.StrVal)
		}
	}
	if diff := cmp.Diff(inService, ports); diff != "" {
		t.Errorf("ports of the Service (-) and of the pods (+):\n%s", diff)
	}
	for name := range ports {
		if !slices.Contains(admitted, name) {
			t.Errorf("the NetworkPolicy does not admit %s: %q", name, admitted)
		}
	}
}

// TestDiscoveryRights checks that the roles are bound to the account of the pods, and name the Secret
// and the ConfigMaps of its settings. test/machines/interop checks that each rule is needed.
func TestDiscoveryRights(t *testing.T) { // D20
	t.Parallel()
	all := load(t, "discovery")
	subject := []rbacv1.Subject{{Kind: "ServiceAccount", Name: all.account.Name, Namespace: system}}
	for name, diff := range map[string]string{
		"ClusterRoleBinding": cmp.Diff(subject, all.clusterBinding.Subjects), "RoleBinding": cmp.Diff(subject, all.binding.Subjects),
		"ClusterRole": cmp.Diff(all.clusterBinding.RoleRef.Name, all.clusterRole.Name), "Role": cmp.Diff(all.binding.RoleRef.Name, all.role.Name),
		"Deployment": cmp.Diff(all.deployment.Spec.Template.Spec.ServiceAccountName, all.account.Name),
	} {
		if diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	named := map[string][]string{} // that may be changed
	for _, rule := range slices.Concat(all.clusterRole.Rules, all.role.Rules) {
		if slices.Contains(rule.Verbs, "update") || slices.Contains(rule.Verbs, "patch") {
			named[rule.Resources[0]] = rule.ResourceNames
		}
		if slices.Contains(rule.Resources, "secrets") && len(rule.ResourceNames) == 0 {
			t.Errorf("rule %v is for all Secrets", rule)
		}
		if slices.Contains(rule.Verbs, "*") || slices.Contains(rule.Resources, "*") || slices.Contains(rule.Resources, "pods") {
			t.Errorf("rule %v", rule)
		}
	}
	args := all.deployment.Spec.Template.Spec.Containers[0].Args
	if secret := named["secrets"]; !slices.Equal(secret, []string{all.secret.Name}) || !slices.Contains(args, "--tls-secret="+system+"/"+all.secret.Name) {
		t.Errorf("the Role is for the Secret %q, the manifest has %q, the arguments are %q", secret, all.secret.Name, args)
	}
	if s := all.secret; s.Namespace != system || len(s.Data)+len(s.StringData) > 0 || s.Type != "" { // replicas write any type
		t.Errorf("the Secret is %+v", s)
	}
	volumes := all.pod.Spec.Volumes
	root := volumes[slices.IndexFunc(volumes, func(v corev1.Volume) bool { return v.Name == "root-cert" })].ConfigMap.Name
	if !slices.Equal(named["configmaps"], []string{root}) {
		t.Errorf("the ClusterRole is for the ConfigMaps %q, the pod mounts %s", named["configmaps"], root)
	}
}

// TestPolicy checks that policy.yaml is for the service account and the ConfigMap of discovery.yaml. D20.
func TestPolicy(t *testing.T) {
	t.Parallel()
	var policy admissionregistrationv1.ValidatingAdmissionPolicy
	var binding admissionregistrationv1.ValidatingAdmissionPolicyBinding
	first, second, _ := strings.Cut(read(t, "kubernetes/policy.yaml"), "\n---\n")
	for text, object := range map[string]any{first: &policy, second: &binding} {
		if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
			t.Fatal(err)
		}
	}
	all := load(t, "discovery")
	if text := policy.Spec.MatchConditions[0].Expression; !strings.HasSuffix(text, ` == "system:serviceaccount:`+system+":"+all.account.Name+`"`) {
		t.Errorf("the policy is for the client %s", text)
	}
	named := slices.IndexFunc(all.clusterRole.Rules, func(rule rbacv1.PolicyRule) bool {
		return slices.Equal(rule.Resources, []string{"configmaps"}) && slices.Contains(rule.Verbs, "patch")
	})
	if text, want := policy.Spec.Validations[0].Expression, `object.metadata.name == "`+all.clusterRole.Rules[named].ResourceNames[0]+`"`; text != want {
		t.Errorf("the policy admits %s, want %s", text, want)
	}
	if binding.Spec.PolicyName != policy.Name {
		t.Errorf("the binding is of %s", binding.Spec.PolicyName)
	}
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
				Names    struct{ Kind, Plural string }
				Versions []struct {
					Name            string
					Served, Storage bool
				}
			}
		}
		if err := yaml.Unmarshal([]byte(document), &definition); err != nil {
			t.Fatal(err)
		}
		line := []string{definition.Spec.Names.Kind, definition.Metadata.Name}
		for _, version := range definition.Spec.Versions {
			if line = append(line, version.Name); version.Storage {
				line = append(line, "(stored)")
			}
		}
		got = append(got, strings.Join(line, " "))
	}
	want := []string{"ServiceEntry serviceentries.networking.istio.io v1 (stored) v1beta1 v1alpha3", "Sidecar sidecars.networking.istio.io v1 (stored) v1beta1 v1alpha3"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestConfigMapPatch applies the patch in docs/discovery.md for objects in a ConfigMap to the Deployment,
// and checks that nametap-discovery accepts its arguments.
func TestConfigMapPatch(t *testing.T) {
	t.Parallel()
	text := read(t, "../docs/discovery.md")
	_, text, found := strings.Cut(text, "    # objects.yaml\n")
	if !found {
		t.Fatal("docs/discovery.md has no objects.yaml")
	}
	var lines []string
	for line := range strings.Lines(text) {
		code, ok := strings.CutPrefix(line, "    ")
		if !ok {
			break
		}
		lines = append(lines, code)
	}
	var patch appsv1.Deployment
	if err := yaml.UnmarshalStrict([]byte(strings.Join(lines, "")), &patch); err != nil {
		t.Fatal(err)
	}
	// As the API server merges it: args are replaced, volumes are added.
	spec, change := load(t, "discovery").deployment.Spec.Template.Spec, patch.Spec.Template.Spec
	spec.Volumes = append(spec.Volumes, change.Volumes...)
	server := &spec.Containers[0]
	server.Args, server.VolumeMounts = change.Containers[0].Args, append(server.VolumeMounts, change.Containers[0].VolumeMounts...)
	if change.Containers[0].Name != server.Name {
		t.Errorf("the patch is for the container %s", change.Containers[0].Name)
	}
	mounted(t, spec)
	i := slices.IndexFunc(spec.Containers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "objects" })
	dir := t.TempDir()
	entry := "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: db, namespace: default}\nspec: {hosts: [db.example.com], addresses: [192.0.2.53]}\n"
	if err := os.WriteFile(filepath.Join(dir, "db.yaml"), []byte(entry), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"table", "--state-dir="}
	for _, arg := range spec.Containers[0].Args {
		args = append(args, strings.ReplaceAll(arg, spec.Containers[0].VolumeMounts[i].MountPath, dir))
	}
	if table := output(t, command(t, nil, "nametap-discovery", args...)); !strings.Contains(table, "db.example.com") {
		t.Errorf("no db.example.com in %s", table)
	}
}
