package deploy

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/internal/testkit/netns"
)

// manifests are the manifests, by the agent's control plane.
var manifests = []string{"istiod", "discovery"}

// objects are the objects of a manifest.
type objects struct {
	pod            corev1.Pod
	deployment     appsv1.Deployment
	service        corev1.Service
	namespace      corev1.Namespace
	account        corev1.ServiceAccount
	clusterRole    rbacv1.ClusterRole
	clusterBinding rbacv1.ClusterRoleBinding
	role           rbacv1.Role
	binding        rbacv1.RoleBinding
	budget         policyv1.PodDisruptionBudget
	policy         networkingv1.NetworkPolicy
	configMap      corev1.ConfigMap
	secret         corev1.Secret
}

// load decodes a manifest strictly: an unknown field fails the test.
func load(t *testing.T, variant string) objects {
	t.Helper()
	var all objects
	for document := range strings.SplitSeq(read(t, "kubernetes/"+variant+".yaml"), "\n---\n") {
		var kind struct{ Kind string }
		if err := yaml.Unmarshal([]byte(document), &kind); err != nil {
			t.Fatalf("%s: %v\n%s", variant, err, document)
		}
		into := map[string]any{
			"Pod": &all.pod, "Deployment": &all.deployment, "Service": &all.service, "Namespace": &all.namespace,
			"ServiceAccount": &all.account, "ClusterRole": &all.clusterRole, "ClusterRoleBinding": &all.clusterBinding,
			"Role": &all.role, "RoleBinding": &all.binding, "PodDisruptionBudget": &all.budget, "NetworkPolicy": &all.policy,
			"ConfigMap": &all.configMap, "Secret": &all.secret,
		}[kind.Kind]
		if into == nil {
			t.Fatalf("%s: kind %q is not expected\n%s", variant, kind.Kind, document)
		}
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Fatalf("%s: %v\n%s", variant, err, document)
		}
	}
	return all
}

// ofImage is the user of an image, which the image names by its number.
const ofImage = -1

// confined fails the test unless a container has exactly these rights. A container of root says so,
// because kubelet would not start it in a pod with runAsNonRoot otherwise.
func confined(t *testing.T, c corev1.Container, user int64, capabilities ...corev1.Capability) {
	t.Helper()
	is, no := true, false
	root, id := &no, &user
	if user != 0 {
		root = &is
	}
	if user == ofImage {
		id = nil
	}
	got := *c.SecurityContext
	want := corev1.SecurityContext{
		RunAsUser: id, RunAsGroup: id, RunAsNonRoot: root,
		AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &is,
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: capabilities},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s: securityContext (-want +got):\n%s", c.Name, diff)
	}
	if c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Memory().IsZero() {
		t.Errorf("%s: no memory limit or request: %v", c.Name, c.Resources)
	}
}

// TestPods checks that the agent is a sidecar before the container of the rules, that it
// has no capabilities, and that the container of the rules has two.
func TestPods(t *testing.T) {
	t.Parallel()
	for _, variant := range manifests {
		pod := load(t, variant).pod
		if len(pod.Spec.InitContainers) != 2 {
			t.Fatalf("%s: %d init containers, want two: the agent and the rules", variant, len(pod.Spec.InitContainers))
		}
		agent, capture := pod.Spec.InitContainers[0], pod.Spec.InitContainers[1]
		confined(t, agent, agentID)
		confined(t, capture, 0, "NET_ADMIN", "NET_RAW")
		if agent.RestartPolicy == nil || *agent.RestartPolicy != corev1.ContainerRestartPolicyAlways || capture.RestartPolicy != nil {
			t.Errorf("%s: restartPolicy %v and %v, want Always and none", variant, agent.RestartPolicy, capture.RestartPolicy)
		}
		if !slices.Equal(agent.Args, []string{"agent", "--supervise"}) { // K15
			t.Errorf("%s: the arguments of the agent are %q", variant, agent.Args)
		}
		if !slices.Equal(capture.Args, []string{"capture", "apply"}) {
			t.Errorf("%s: the arguments of the rules' container are %q", variant, capture.Args)
		}
		started(t, agent)
		// The measured memory with 100,000 hosts, and the binary.
		if least := resource.MustParse("171Mi"); agent.Resources.Limits.Memory().Cmp(least) < 0 {
			t.Errorf("%s: memory limit %v, want more than %v", variant, agent.Resources.Limits.Memory(), least.String())
		}
		if pod.Spec.SecurityContext.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || *pod.Spec.AutomountServiceAccountToken {
			t.Errorf("%s: want seccomp's RuntimeDefault and no token for the API server", variant)
		}
		if diff := cmp.Diff(agent.Env, capture.Env); diff != "" {
			t.Errorf("%s: the agent and the rules have different settings:\n%s", variant, diff)
		}
		mounted(t, pod.Spec)
	}
}

// started fails the test unless the probes of the agent's container delay no start, and kubelet
// restarts the container only after the supervisor had time to replace a hung agent.
func started(t *testing.T, agent corev1.Container) { // I0, K15
	t.Helper()
	if agent.StartupProbe != nil {
		t.Errorf("%s has a startup probe, which delays the start of the pod", agent.Name)
	}
	for path, probe := range map[string]*corev1.Probe{"/healthz/ready": agent.ReadinessProbe, "/healthz/live": agent.LivenessProbe} {
		if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != path || containerPort(agent, probe) != 15020 || probe.InitialDelaySeconds != 0 {
			t.Fatalf("%s: probe %v", path, probe)
		}
	}
	live := agent.LivenessProbe
	// The supervisor kills a hung agent after at most 20 s.
	if least, most := live.PeriodSeconds*(live.FailureThreshold-1), live.PeriodSeconds*live.FailureThreshold; least < 22 || most > 30 {
		t.Errorf("kubelet restarts the container after %d to %d s", least, most)
	}
	settings := map[string]string{}
	for _, variable := range agent.Env {
		settings[variable.Name] = variable.Value
	}
	wait, err := time.ParseDuration(settings["NAMETAP_CAPTURE_WAIT"])
	if err != nil || wait < 10*time.Second {
		t.Errorf("the pod waits for the agent for %v, %v", wait, err)
	}
}

// TestImages checks that the manifests, the README and `make image` agree on the names and the
// tag of the images, and that kubelet does not pull an image that the node has.
func TestImages(t *testing.T) { // I0
	netns.Need(t, "make")
	// tools/image has tests of what the names become; node imports the images.
	text := output(t, command(t, nil, "make", "-C", "..", "-n", "image"))
	name, version := regexp.MustCompile(`IMAGE='([^']+)'`).FindStringSubmatch(text), regexp.MustCompile(`VERSION='([^']+)'`).FindStringSubmatch(text)
	if name == nil || version == nil {
		t.Fatalf("make image has no name or no version:\n%s", text)
	}
	var built []string
	for _, suffix := range []string{"", "-init", "-discovery"} {
		built = append(built, name[1]+suffix+":"+version[1])
	}
	readme, used := read(t, "../README.md"), map[string]bool{}
	for _, variant := range manifests {
		all := load(t, variant)
		for _, c := range slices.Concat(all.pod.Spec.InitContainers, all.deployment.Spec.Template.Spec.Containers) {
			used[c.Image] = true
			if !slices.Contains(built, c.Image) || !strings.Contains(readme, "`"+c.Image+"`") {
				t.Errorf("%s: image %s; `make image` builds %q", variant, c.Image, built)
			}
			if c.ImagePullPolicy != corev1.PullIfNotPresent {
				t.Errorf("%s: %s has the pull policy %q", variant, c.Name, c.ImagePullPolicy)
			}
		}
		for _, c := range all.pod.Spec.Containers {
			if _, tag, ok := strings.Cut(c.Image, ":"); !ok || tag == "latest" {
				t.Errorf("%s: image %s", variant, c.Image)
			}
		}
	}
	if len(used) != 3 {
		t.Errorf("`make image` builds %q; the manifests use %v", built, used)
	}
}

// containerPort returns the number of a probe's port.
func containerPort(c corev1.Container, probe *corev1.Probe) int32 {
	for _, port := range c.Ports {
		if port.Name == probe.HTTPGet.Port.StrVal {
			return port.ContainerPort
		}
	}
	return probe.HTTPGet.Port.IntVal
}

// mounted fails the test unless every volume is mounted and every mount has a volume.
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
	}
	if diff := cmp.Diff(volumes, mounts, cmpopts.SortSlices(strings.Compare)); diff != "" {
		t.Errorf("volumes and mounts (-volumes +mounts):\n%s", diff)
	}
}

// TestCredentials checks that the token and the root certificate are at the agent's default paths,
// and that the token is for the control plane.
func TestCredentials(t *testing.T) {
	t.Parallel()
	help := output(t, command(t, nil, "nametap", "agent", "--help"))
	audience := output(t, command(t, nil, "nametap-discovery", "--help"))
	for variant, configMap := range map[string]string{"istiod": "istio-ca-root-cert", "discovery": "nametap-ca-root-cert"} {
		spec := load(t, variant).pod.Spec
		for volume, file := range map[string]string{"token": "istio-token", "root-cert": "root-cert.pem"} {
			i := slices.IndexFunc(spec.InitContainers[0].VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == volume })
			if path := filepath.Join(spec.InitContainers[0].VolumeMounts[i].MountPath, file); !strings.Contains(help, path) {
				t.Errorf("%s: %s is not a default of the agent", variant, path)
			}
		}
		volume := func(name string) corev1.Volume {
			return spec.Volumes[slices.IndexFunc(spec.Volumes, func(v corev1.Volume) bool { return v.Name == name })]
		}
		token := volume("token").Projected.Sources[0].ServiceAccountToken
		if token.Audience != "istio-ca" || token.Path != "istio-token" || !strings.Contains(audience, token.Audience) {
			t.Errorf("%s: token %v", variant, token)
		}
		if got := volume("root-cert").ConfigMap.Name; got != configMap || variant == "discovery" && !strings.Contains(audience, got) {
			t.Errorf("%s: the root certificate is in %s", variant, got)
		}
	}
}
