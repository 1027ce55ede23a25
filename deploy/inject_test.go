package deploy

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
	"github.com/nametap/nametap/inject/webhook"
)

// TestInjectedEqualsManifest injects the application of each manifest, by the command, and compares
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
		file := filepath.Join(t.TempDir(), "app.yaml")
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := command(t, nil, "nametap", "inject", "-f", file, "--root-cert", rootCert, "--control-plane", "other:15012")
		injected, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		var got corev1.Pod
		if err := yaml.UnmarshalStrict(injected, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(alike(want.Spec), alike(got.Spec)); diff != "" {
			t.Errorf("%s (-manifest +injected):\n%s", variant, diff)
		}
	}
}

// TestInjectSpeaks checks that errors and help of `nametap inject` name that program, although nametap-discovery does
// the work.
func TestInjectSpeaks(t *testing.T) { // I13
	t.Parallel()
	for _, args := range [][]string{{"--mode", "cni"}, {"-f", "missing.yaml"}, {"--nonsense"}, {"--help"}} {
		output, err := command(t, nil, "nametap", append([]string{"inject"}, args...)...).CombinedOutput()
		if help := slices.Contains(args, "--help"); (err == nil) != help || !help && !strings.HasPrefix(string(output), "nametap: ") || strings.Contains(string(output), "nametap-discovery") {
			t.Errorf("%q: %v\n%s", args, err, output)
		}
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

// TestWebhookManifest checks webhook.yaml against the rest: the Service and its port, the paths that
// nametap-discovery serves, the namespaces that are ignored, and that it leaves caBundle to replicas.
func TestWebhookManifest(t *testing.T) { // I8, I9
	t.Parallel()
	var configuration admissionregistrationv1.MutatingWebhookConfiguration
	var role rbacv1.ClusterRole
	var binding rbacv1.ClusterRoleBinding
	for i, document := range strings.Split(read(t, "kubernetes/webhook.yaml"), "\n---\n") {
		if err := yaml.UnmarshalStrict([]byte(document), []any{&role, &binding, &configuration}[i]); err != nil {
			t.Fatal(err)
		}
	}
	all := load(t, "discovery")
	args := all.deployment.Spec.Template.Spec.Containers[0].Args
	var paths []string
	for _, hook := range configuration.Webhooks {
		service := hook.ClientConfig.Service
		paths = append(paths, *service.Path)
		if service.Name != all.service.Name || service.Namespace != system || !slices.Contains(args, fmt.Sprintf("--inject-addr=:%d", *service.Port)) ||
			!slices.ContainsFunc(all.service.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == *service.Port }) {
			t.Errorf("%s: service %v", hook.Name, service)
		}
		if len(hook.ClientConfig.CABundle) > 0 || *hook.SideEffects != admissionregistrationv1.SideEffectClassNone || *hook.FailurePolicy != admissionregistrationv1.Fail || *hook.ReinvocationPolicy != admissionregistrationv1.IfNeededReinvocationPolicy {
			t.Errorf("%s: %+v", hook.Name, hook)
		}
		ignored := hook.NamespaceSelector.MatchExpressions[len(hook.NamespaceSelector.MatchExpressions)-1]
		if diff := cmp.Diff(inject.DefaultConfig().IgnoredNamespaces, ignored.Values); diff != "" || ignored.Operator != metav1.LabelSelectorOpNotIn {
			t.Errorf("%s: ignored namespaces (-settings +selector):\n%s", hook.Name, diff)
		}
		if diff := cmp.Diff(configuration.Webhooks[0].MatchConditions, hook.MatchConditions); diff != "" {
			t.Errorf("%s: conditions:\n%s", hook.Name, diff)
		}
	}
	if diff := cmp.Diff([]string{webhook.PathNamespace, webhook.PathPod}, paths); diff != "" {
		t.Errorf("paths (-want +got):\n%s", diff)
	}
	settings, err := inject.ParseConfig([]byte(all.configMap.Data["inject.yaml"]))
	if err != nil {
		t.Fatal(err)
	}
	if settings.ControlPlane != all.service.Name+"."+system+".svc:15012" || !slices.Contains(args, "--inject-config=/etc/nametap-inject/inject.yaml") {
		t.Errorf("settings %+v, arguments %q", settings, args)
	}
	// The right to change the webhook is power over the cluster, so it comes with the webhook only.
	may := func(rules []rbacv1.PolicyRule) (verbs []string) {
		for _, r := range rules {
			if slices.Contains(r.Resources, "mutatingwebhookconfigurations") && slices.Equal(r.ResourceNames, []string{configuration.Name}) {
				verbs = append(verbs, r.Verbs...)
			}
		}
		return verbs
	}
	if diff := cmp.Diff([]string{"list", "watch"}, may(all.clusterRole.Rules)); diff != "" {
		t.Errorf("discovery.yaml (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"patch"}, may(role.Rules)); diff != "" || len(role.Rules) != 1 {
		t.Errorf("webhook.yaml (-want +got):\n%s", diff)
	}
	if binding.RoleRef.Name != role.Name || binding.Subjects[0].Name != all.account.Name || binding.Subjects[0].Namespace != all.account.Namespace {
		t.Errorf("webhook.yaml: %+v", binding)
	}
}
