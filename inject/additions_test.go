package inject_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

// text writes a pod.
func text(t *testing.T, pod corev1.Pod) string {
	t.Helper()
	out, err := kyaml.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// added returns a pod with what a cluster adds to all containers, or changes in them: LimitRanger,
// AlwaysPullImages, a webhook that rewrites images, the token of the service account, variables, the labels of
// SELinux, and defaults.
func added(pod corev1.Pod) corev1.Pod {
	pod = *pod.DeepCopy()
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			c := &list[i]
			c.Image = "mirror.example/" + c.Image
			c.ImagePullPolicy = corev1.PullAlways
			if c.Resources.Limits == nil {
				c.Resources.Limits = corev1.ResourceList{}
			}
			c.Resources.Limits[corev1.ResourceCPU] = resource.MustParse("1")
			c.Resources.Limits[corev1.ResourceEphemeralStorage] = resource.MustParse("1Gi")
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "kube-api-access-x", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"})
			c.Env = append(c.Env, corev1.EnvVar{Name: "HTTP_PROXY", Value: "proxy:1"})
			if c.SecurityContext == nil {
				c.SecurityContext = new(corev1.SecurityContext)
			}
			c.SecurityContext.SELinuxOptions = &corev1.SELinuxOptions{Level: "s0:c1"}
			c.TerminationMessagePath = "/dev/termination-log"
			for _, p := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
				if p != nil {
					p.SuccessThreshold = 1
				}
			}
		}
	}
	mode := int32(420)
	for i := range pod.Spec.Volumes {
		if source := pod.Spec.Volumes[i].Projected; source != nil {
			source.DefaultMode = &mode
		}
	}
	pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: "kube-api-access-x"})
	return pod
}

// TestAdditionsAndSettings checks that other settings replace what follows from them, and leave what others have
// added and changed beside it.
func TestAdditionsAndSettings(t *testing.T) { // I2
	t.Parallel()
	first := added(injected(t, plain, inject.Config{Settings: map[string]string{"ttl": "1m", "cache-size": "8MiB"}}))
	want := *first.DeepCopy()
	for i := range want.Spec.InitContainers[:2] {
		c := &want.Spec.InitContainers[i]
		for j, v := range c.Env {
			switch v.Name {
			case "NAMETAP_CACHE_SIZE":
				c.Env[j].Value = "9MiB"
			case "NAMETAP_TTL":
				c.Env = append(c.Env[:j], c.Env[j+1:]...)
			}
		}
	}
	want.Spec.InitContainers[0].Image = "nametap:2"
	got := injected(t, text(t, first), inject.Config{Image: "nametap:2", Settings: map[string]string{"cache-size": "9MiB"}})
	delete(want.Annotations, inject.Status)
	delete(got.Annotations, inject.Status)
	for i := range want.Spec.InitContainers {
		byName := cmp.Diff(variables(want.Spec.InitContainers[i]), variables(got.Spec.InitContainers[i]))
		if byName != "" {
			t.Error(byName)
		}
		want.Spec.InitContainers[i].Env, got.Spec.InitContainers[i].Env = nil, nil
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// TestForgedStatus checks that an annotation by the pod's author keeps only fields that the author could set
// without nametap, and that the pod gets the rest.
func TestForgedStatus(t *testing.T) { // I2
	t.Parallel()
	status := injected(t, plain, inject.Config{}).Annotations[inject.Status]
	const own = "[{name: nametap, image: own, command: [sleep], securityContext: {privileged: true}}]"
	pod := "metadata: {name: app, annotations: {" + inject.Status + ": '" + status + "'}}\nspec: {initContainers: " + own + ", containers: [{name: app, image: app}]}\n"
	got := injected(t, pod, inject.Config{})
	if diff := cmp.Diff(typed(t, pod).Spec.InitContainers[0], got.Spec.InitContainers[0]); diff != "" {
		t.Errorf("the container of the author:\n%s", diff)
	}
	want := injected(t, plain, inject.Config{})
	if diff := cmp.Diff(want.Spec.InitContainers[1], got.Spec.InitContainers[1]); diff != "" {
		t.Errorf("the container that is missing:\n%s", diff)
	}
	if diff := cmp.Diff(want.Spec.Volumes, got.Spec.Volumes); diff != "" {
		t.Error(diff)
	}
	bare := strings.Replace(strings.Replace(pod, "image: own, command: [sleep], securityContext: {privileged: true}", "image: own", 1), status, `{"mode":"rules","initContainers":{"nametap":""},"volumes":{}}`, 1)
	if diff := cmp.Diff(want.Spec.InitContainers[:2], injected(t, bare, inject.Config{}).Spec.InitContainers); diff != "" {
		t.Errorf("a container without fields:\n%s", diff)
	}
	// Marks that are missing, or of another length, come from another version.
	for _, marks := range []string{"", "abcd", strings.Repeat("a", 1000)} {
		before := `{"mode":"rules","initContainers":{"nametap":"` + marks + `"},"volumes":{}}`
		got := injected(t, strings.Replace(pod, status, before, 1), inject.Config{})
		if agent := got.Spec.InitContainers[0]; agent.Image == "own" || *agent.SecurityContext.RunAsUser != 1337 || !*agent.SecurityContext.Privileged {
			t.Errorf("%q: %+v", marks, agent)
		}
	}
}
