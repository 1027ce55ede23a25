package inject_test

import (
	"encoding/json"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

// A pods draws pods, namespaces and settings.
type pods struct{ *rand.Rand }

// one draws an element.
func one[T any](p pods, list ...T) T { return list[p.IntN(len(list))] }

// maybe reports true for one of n.
func (p pods) maybe(n int) bool { return p.IntN(n) == 0 }

// number draws a pointer to a number, nil for none.
func (p pods) number(list ...int64) *int64 {
	if p.maybe(3) {
		return nil
	}
	n := one(p, list...)
	return &n
}

// keys draws a map of some of the pairs of keys and values.
func (p pods) keys(pairs map[string][]string) map[string]string {
	var m map[string]string
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		if p.maybe(3) {
			if m == nil {
				m = map[string]string{}
			}
			m[key] = one(p, pairs[key]...)
		}
	}
	return m
}

// container draws a container.
func (p pods) container(name string) corev1.Container {
	c := corev1.Container{Name: name, Image: name}
	if p.maybe(4) {
		c.SecurityContext = &corev1.SecurityContext{RunAsUser: p.number(0, 1000, 1337), RunAsGroup: p.number(0, 1337)}
	}
	if p.maybe(3) {
		c.Ports = []corev1.ContainerPort{{ContainerPort: one[int32](p, 53, 80, 8080, 15020, 15053, 15056)}}
	}
	if p.maybe(3) {
		c.Env = []corev1.EnvVar{{Name: "A", Value: one(p, "", "yes", "1:30", "a\nb", "\u2028", "{}")}}
	}
	if p.maybe(3) {
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(one(p, "1", "1500m"))}
	}
	if p.maybe(4) {
		c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(80)}}}
	}
	return c
}

// pod draws a pod.
func (p pods) pod() corev1.Pod {
	pod := corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{p.container("app")}}}
	pod.APIVersion, pod.Kind, pod.Name, pod.Namespace = "v1", "Pod", "app", "shop"
	pod.Labels = p.keys(map[string][]string{"app": {"web"}, inject.Label: {"true", "true", "false", "yes"}, "istio.io/dataplane-mode": {"ambient", "none"}})
	pod.Annotations = p.keys(map[string][]string{
		"nametap.dev/mode": {"rules", "resolv", "cni"}, "nametap.dev/memory-limit": {"256Mi", "", "x"}, "nametap.dev/cpu-limit": {"1", "10m", "1m"},
		"nametap.dev/cpu-request": {"", "5m"}, "nametap.dev/guard": {"sandbox", "", ""}, "proxy.istio.io/config": {"discoveryAddress: a:1", "concurrency: 2", "{{"}, "text": {"\u2028 \" <&>", "a: b"},
	})
	for _, name := range []string{"prepare", "istio-init", "nametap"} {
		if p.maybe(6) {
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, p.container(name))
		}
	}
	if p.maybe(5) {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: "istio-proxy", Image: "proxy", Env: []corev1.EnvVar{{Name: "ISTIO_META_DNS_CAPTURE", Value: "true"}}})
	}
	if p.maybe(4) {
		pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{Name: one(p, "data", "data", "nametap-state")})
	}
	if p.maybe(4) {
		pod.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: p.number(1000, 1337)}
		if p.maybe(2) {
			pod.Spec.SecurityContext.Sysctls = []corev1.Sysctl{{Name: one(p, "net.core.somaxconn", "net.ipv4.ip_unprivileged_port_start"), Value: one(p, "0", "53", "1024")}}
		}
	}
	pod.Spec.DNSPolicy = one(p, "", "", corev1.DNSClusterFirst, corev1.DNSNone, corev1.DNSDefault)
	if p.maybe(3) || pod.Spec.DNSPolicy == corev1.DNSNone {
		value := one(p, "2", "5")
		pod.Spec.DNSConfig = &corev1.PodDNSConfig{
			Nameservers: one(p, nil, []string{"192.0.2.1"}, []string{"192.0.2.1", "fd00::1"}, []string{"127.0.0.1"}),
			Searches:    one(p, nil, []string{"corp.example"}, []string{"cluster.local", "a.example"}),
			Options:     one(p, nil, []corev1.PodDNSConfigOption{{Name: "ndots", Value: &value}, {Name: "use-vc"}}),
		}
	}
	if p.maybe(5) {
		pod.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: one(p, "own", "registry")}}
	}
	pod.Spec.HostNetwork = p.maybe(20)
	return pod
}

// namespace draws a namespace.
func (p pods) namespace() inject.Namespace {
	return inject.Namespace{
		Name: "shop", Requested: true,
		Labels:      p.keys(map[string][]string{inject.Label: {"enabled", "enabled", "disabled"}, "istio.io/dataplane-mode": {"ambient"}}),
		Annotations: p.keys(map[string][]string{"nametap.dev/mode": {"resolv", "rules"}, "openshift.io/sa.scc.uid-range": {"1000/10"}}),
	}
}

// config draws settings.
func (p pods) config() inject.Config {
	cfg := inject.Config{
		Mode: one(p, inject.Rules, inject.Resolv), Nameservers: []string{"10.96.0.10"}, Image: one(p, "", "registry/nametap:2"),
		ControlPlane: one(p, "", "discovery:15012"), ClusterDomain: one(p, "", "corp.example"), ClusterID: one(p, "", "c1"),
		ImagePullSecrets: one(p, nil, []string{"registry"}), Settings: p.keys(map[string][]string{"cache-size": {"8MiB"}, "drain": {"1s"}, "dns-addr": {"localhost:16000"}}),
	}
	if p.maybe(3) {
		cfg.Resources.Limits = inject.Amounts{"cpu": one(p, "1", "2")}
	}
	return cfg
}

// byWebhook returns what the webhook makes of a pod, in JSON.
func byWebhook(t *testing.T, object []byte, ns inject.Namespace, cfg inject.Config) (out []byte, result inject.Result) {
	t.Helper()
	result, patch, err := inject.Admit(object, ns, cfg)
	if err != nil {
		t.Fatalf("%v\n%s", err, object)
	}
	if patch == nil {
		return object, result
	}
	var pod corev1.Pod // as the API server does, in the order of its fields
	if err := json.Unmarshal([]byte(patched(t, object, patch)), &pod); err != nil {
		t.Fatal(err)
	}
	out, err = json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	return out, result
}

// byCommand returns what the command makes of a pod in a manifest with its namespace.
func byCommand(t *testing.T, object []byte, ns inject.Namespace, cfg inject.Config) (pod corev1.Pod, report inject.Report) {
	t.Helper()
	space := corev1.Namespace{}
	space.APIVersion, space.Kind, space.Name, space.Labels, space.Annotations = "v1", "Namespace", ns.Name, ns.Labels, ns.Annotations
	text, err := kyaml.Marshal(space)
	if err != nil {
		t.Fatal(err)
	}
	own, err := kyaml.JSONToYAML(object)
	if err != nil {
		t.Fatal(err)
	}
	text = append(append(text, "---\n"...), own...)
	out, reports, err := inject.Manifest(text, "default", cfg)
	if err != nil || len(reports) != 1 {
		t.Fatalf("%v %v\n%s", err, reports, text)
	}
	_, written, _ := strings.Cut(string(out), "---\n")
	return typed(t, written), reports[0]
}

// valid fails the test unless the names in a pod are unique, and each mount has its volume.
func valid(t *testing.T, pod corev1.Pod) {
	t.Helper()
	seen := map[string]bool{}
	volumes := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		if volumes[v.Name] {
			t.Errorf("two volumes %s", v.Name)
		}
		volumes[v.Name] = true
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		variables := map[string]bool{}
		for _, v := range c.Env {
			if variables[v.Name] || v.Value != "" && v.ValueFrom != nil {
				t.Errorf("%s: variable %+v", c.Name, v)
			}
			variables[v.Name] = true
		}
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				t.Errorf("%s: no volume %s", c.Name, m.Name)
			}
		}
		for name, request := range c.Resources.Requests {
			if limit, ok := c.Resources.Limits[name]; ok && request.Cmp(limit) > 0 {
				t.Errorf("%s: requests more %s than the limit", c.Name, name)
			}
		}
		if seen[c.Name] || c.Image == "" {
			t.Errorf("container %+v", c)
		}
		seen[c.Name] = true
	}
}

// TestRandomPods draws pods, namespaces and settings. The command and the webhook agree, what they make is valid, a
// second injection changes nothing, also after a cluster has added to the pod, and other settings make the same pod
// as if they had been the first.
func TestRandomPods(t *testing.T) { // I1, I2, I3, I14
	t.Parallel()
	outcomes := map[inject.Outcome]int{}
	for seed := range uint64(200) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			p := pods{rand.New(rand.NewPCG(26, seed))} //nolint:gosec // repeatable
			ns, cfg, before := p.namespace(), p.config(), p.pod()
			object, err := json.Marshal(before)
			if err != nil {
				t.Fatal(err)
			}
			out, result := byWebhook(t, object, ns, cfg)
			pod, report := byCommand(t, object, ns, cfg)
			outcomes[result.Outcome]++
			if diff := cmp.Diff(report.Reasons, result.Reasons); diff != "" || report.Outcome != result.Outcome {
				t.Errorf("the command and the webhook differ:\n%s", diff)
			}
			if result.Outcome != inject.Injected {
				if diff := cmp.Diff(before, pod); diff != "" {
					t.Errorf("the pod has changed:\n%s", diff)
				}
				return
			}
			if diff := cmp.Diff(pod, typed(t, string(out))); diff != "" {
				t.Errorf("(-command +webhook):\n%s", diff)
			}
			valid(t, pod)
			again, _ := byWebhook(t, out, ns, cfg)
			if diff := cmp.Diff(string(out), string(again)); diff != "" {
				t.Errorf("a second injection:\n%s", diff)
			}
			more, err := json.Marshal(added(pod))
			if err != nil {
				t.Fatal(err)
			}
			if again, _ := byWebhook(t, more, ns, cfg); string(again) != string(more) {
				t.Errorf("after additions:\n%s", cmp.Diff(typed(t, string(more)), typed(t, string(again))))
			}
			other := p.config()
			there, result := byWebhook(t, out, ns, other)
			if result.Outcome != inject.Injected {
				return // a port that these settings have
			}
			atOnce, _ := byWebhook(t, object, ns, other)
			if diff := cmp.Diff(sorted(t, atOnce), sorted(t, there)); diff != "" {
				t.Errorf("at once (-) and after other settings (+):\n%s", diff)
			}
		})
	}
	t.Logf("%v", outcomes)
	for _, outcome := range []inject.Outcome{inject.Injected, inject.Skipped, inject.Refused} {
		if outcomes[outcome] < 20 {
			t.Errorf("%d pods are %s", outcomes[outcome], outcome)
		}
	}
}

// sorted reads a pod, with its volumes and empty fields in one form.
func sorted(t *testing.T, text []byte) corev1.Pod {
	t.Helper()
	pod := typed(t, string(text))
	if dns := pod.Spec.DNSConfig; dns != nil && len(dns.Nameservers)+len(dns.Searches)+len(dns.Options) == 0 {
		pod.Spec.DNSConfig = nil
	}
	if context := pod.Spec.SecurityContext; context != nil && cmp.Equal(*context, corev1.PodSecurityContext{}) {
		pod.Spec.SecurityContext = nil
	}
	slices.SortFunc(pod.Spec.Volumes, func(a, b corev1.Volume) int { return strings.Compare(a.Name, b.Name) })
	return pod
}
