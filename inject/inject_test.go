package inject_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

// shop is a namespace whose pods are injected.
var shop = inject.Namespace{Name: "shop", Labels: map[string]string{inject.Label: inject.Enabled}}

// resolv is a Config of mode resolv.
var resolv = inject.Config{Mode: inject.Resolv, Nameservers: []string{"10.96.0.10"}}

// parse reads a pod.
func parse(t *testing.T, text string) map[string]any {
	t.Helper()
	var pod map[string]any
	if err := kyaml.Unmarshal([]byte(text), &pod); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return pod
}

// format writes a pod.
func format(t *testing.T, pod map[string]any) string {
	t.Helper()
	text, err := kyaml.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// injected returns a pod with nametap in it, as the API server reads it: an unknown field fails the
// test.
func injected(t *testing.T, text string, cfg inject.Config) corev1.Pod {
	t.Helper()
	return typed(t, injectText(t, text, cfg))
}

// injectText injects a pod in the namespace shop, which must succeed, and so must a second injection
// that changes nothing.
func injectText(t *testing.T, text string, cfg inject.Config) string {
	t.Helper()
	result, err := inject.Pod(parse(t, text), shop, cfg)
	if err != nil || result.Outcome != inject.Injected {
		t.Fatalf("%v %v\n%s", result, err, text)
	}
	out := format(t, result.Pod)
	again, err := inject.Pod(parse(t, out), shop, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(out, format(t, again.Pod)); diff != "" { // I2
		t.Errorf("a second injection:\n%s", diff)
	}
	return out
}

// typed reads a pod strictly.
func typed(t *testing.T, text string) corev1.Pod {
	t.Helper()
	var pod corev1.Pod
	if err := kyaml.UnmarshalStrict([]byte(text), &pod); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return pod
}

// names returns the names of containers.
func names(containers []corev1.Container) []string {
	var list []string
	for _, c := range containers {
		list = append(list, c.Name)
	}
	return list
}

// variables returns the environment of a container.
func variables(c corev1.Container) map[string]string {
	values := map[string]string{}
	for _, v := range c.Env {
		values[v.Name] = v.Value
	}
	return values
}

const plain = `
metadata: {name: app}
spec:
  initContainers: [{name: prepare, image: busybox}]
  containers: [{name: app, image: app}]
`

// probers is the variable of istio-proxy with the probes that Istio's injector has redirected to Istio's
// agent.
const probers = "ISTIO_KUBE_APP_PROBERS"

const excludeInbound = "traffic.sidecar.istio.io/excludeInboundPorts"

// excludedBy returns the ports that Istio's injector excludes for a pod with annotations.
func excludedBy(annotations map[string]string) string {
	if ports, set := annotations[excludeInbound]; set {
		return ports
	}
	return "15090,15021"
}

// istio adds what Istio's injector adds, as far as it matters here: its containers come before all
// other init containers, and the probes of others lead to port 15020.
func istio(t *testing.T, text string) string {
	t.Helper()
	pod := typed(t, text)
	capture := []corev1.EnvVar{{Name: "ISTIO_META_DNS_CAPTURE", Value: "true"}, {Name: "OTHER", Value: "x"}}
	user, always := int64(1337), corev1.ContainerRestartPolicyAlways
	ours := []corev1.Container{
		{Name: "istio-init", Image: "proxyv2", Env: capture, Args: []string{"istio-iptables", "-b", "*", "-d", excludedBy(pod.Annotations)}},
		{Name: "istio-proxy", Image: "proxyv2", Env: capture, RestartPolicy: &always, SecurityContext: &corev1.SecurityContext{RunAsUser: &user, RunAsGroup: &user}},
	}
	pod.Spec.InitContainers = slices.DeleteFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return strings.HasPrefix(c.Name, "istio-") })
	for _, c := range pod.Spec.InitContainers {
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			if probe == nil || probe.HTTPGet == nil {
				continue
			}
			probe.HTTPGet.Path, probe.HTTPGet.Port = "/app-health/"+c.Name+probe.HTTPGet.Path, intstr.FromInt32(15020)
			ours[1].Env = append(slices.Clone(capture), corev1.EnvVar{Name: probers, Value: c.Name})
		}
	}
	pod.Spec.InitContainers = append(ours, pod.Spec.InitContainers...)
	out, err := kyaml.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// TestIstio checks that pods are equal whether Istio's injector ran before, or after and nametap then
// once more, as with the reinvocation policy IfNeeded.
func TestIstio(t *testing.T) { // I5
	t.Parallel()
	for _, cfg := range []inject.Config{{}, resolv} {
		after := typed(t, injectText(t, istio(t, plain), cfg))
		before := typed(t, injectText(t, istio(t, injectText(t, plain, cfg)), cfg))
		// It lists probes that are gone, which does no harm.
		for i, c := range before.Spec.InitContainers {
			before.Spec.InitContainers[i].Env = slices.DeleteFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == probers })
		}
		if diff := cmp.Diff(after, before); diff != "" {
			t.Errorf("after Istio's injector (-), before it (+):\n%s", diff)
		}
		want := []string{"nametap", "nametap-capture", "istio-init", "istio-proxy", "prepare"}
		if cfg.Mode == inject.Resolv {
			want = slices.Delete(want, 1, 2)
		}
		if diff := cmp.Diff(want, names(after.Spec.InitContainers)); diff != "" {
			t.Error(diff)
		}
		for _, c := range after.Spec.InitContainers {
			if !strings.HasPrefix(c.Name, "istio-") {
				continue
			}
			if diff := cmp.Diff(map[string]string{"ISTIO_META_DNS_CAPTURE": "false", "OTHER": "x"}, variables(c)); diff != "" {
				t.Errorf("%s: %s", c.Name, diff)
			}
		}
		agent := after.Spec.InitContainers[0]
		if variables(agent)["NAMETAP_STATUS_ADDR"] != ":15055" || !slices.Equal(agent.Ports, []corev1.ContainerPort{{Name: "status", ContainerPort: 15055}}) {
			t.Errorf("the agent has the port of Istio's agent: %v, %v", agent.Env, agent.Ports)
		}
		if excluded := after.Annotations[excludeInbound]; excluded != "15090,15021,15055" {
			t.Errorf("Istio sends connections to the status port to Envoy, excluded are %q", excluded)
		}
		for _, probe := range []*corev1.Probe{agent.ReadinessProbe, agent.LivenessProbe} {
			if probe.HTTPGet != nil || probe.Exec == nil {
				t.Errorf("Istio's rules redirect the probe %v to Envoy", probe)
			}
		}
	}
}

// TestIstioExcludedPorts checks that the ports that a pod excludes from Istio's rules stay excluded, and that its other arguments
// stay.
func TestIstioExcludedPorts(t *testing.T) { // I5
	t.Parallel()
	for _, test := range []struct{ annotation, args, wantAnnotation, wantArgs string }{
		{``, `other`, "", "other"}, // the injector is still to come: the annotation would replace the ports of the mesh
		{``, `istio-iptables`, "15055", "istio-iptables"},
		{`"9000"`, `-d, "15090,9000"`, "9000,15055", "-d 15090,9000,15055"},
		{`"9000, 15055"`, `-d, "15090"`, "9000, 15055", "-d 15090,15055"},
		{``, `-d, "", --run-validation`, "15055", "-d 15055 --run-validation"},
		{``, `--istio-local-exclude-ports, "150550"`, "150550,15055", "--istio-local-exclude-ports 150550,15055"},
	} {
		annotations := "{}"
		if test.annotation != "" {
			annotations = "{" + excludeInbound + ": " + test.annotation + "}"
		}
		pod := injected(t, `
metadata: {name: app, annotations: `+annotations+`}
spec:
  containers: [{name: app, image: app, args: [-d, "1"]}, {name: istio-proxy, image: proxyv2, args: [-d, "1"]}]
  initContainers: [{name: `+map[bool]string{true: "istio-init", false: "other"}[test.wantAnnotation != ""]+`, image: proxyv2, args: [`+test.args+`]}]
`, inject.Config{})
		got := strings.Join(pod.Spec.InitContainers[2].Args, " ")
		if pod.Annotations[excludeInbound] != test.wantAnnotation || got != test.wantArgs || pod.Spec.Containers[0].Args[1] != "1" || pod.Spec.Containers[1].Args[1] != "1" {
			t.Errorf("%+v: %q, %q, %v", test, pod.Annotations[excludeInbound], got, pod.Spec.Containers)
		}
	}
}

// TestIstioWithoutVariable checks that the DNS capture of Istio is also off if a template of another
// version sets no variable, or takes it from a field.
func TestIstioWithoutVariable(t *testing.T) { // I5
	t.Parallel()
	pod := injected(t, `
metadata: {name: app}
spec:
  containers:
  - {name: app, image: app}
  - name: istio-proxy
    image: proxyv2
  initContainers:
  - name: istio-init
    image: proxyv2
    env: [{name: ISTIO_META_DNS_CAPTURE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
`, inject.Config{})
	want := []corev1.EnvVar{{Name: "ISTIO_META_DNS_CAPTURE", Value: "false"}}
	if diff := cmp.Diff([][]corev1.EnvVar{want, want}, [][]corev1.EnvVar{pod.Spec.Containers[1].Env, pod.Spec.InitContainers[2].Env}); diff != "" {
		t.Error(diff)
	}
}

// TestControlPlaneOfPod checks that the address in the pod's annotation takes precedence, and that nothing else
// counts as one.
func TestControlPlaneOfPod(t *testing.T) { // I1
	t.Parallel()
	for config, own := range map[string]bool{
		"discoveryAddress: own:15012":                           true,
		"a: b\ndiscoveryAddress: 'own:15012'\n":                 true,
		`{"concurrency": 2, "discoveryAddress": "own:15012"}`:   true,
		`{discoveryAddress: own:15012}`:                         true,
		"# discoveryAddress: own:15012\na: b":                   false,
		"discoveryAddress:\na: b":                               false,
		"discoveryAddress: ''":                                  false,
		"proxyMetadata: {A: 'the discoveryAddress: own:15012'}": false,
		"olddiscoveryAddress: own:15012":                        false,
		"discoveryAddressed: own:15012":                         false,
	} {
		text := fmt.Sprintf("metadata: {name: app, annotations: {proxy.istio.io/config: %q}}\nspec: {containers: [{name: app, image: app}]}\n", config)
		pod := injected(t, text, inject.Config{ControlPlane: "other:15012"})
		if address, ok := variables(pod.Spec.InitContainers[0])["NAMETAP_XDS_ADDR"]; ok == own {
			t.Errorf("%q: the address of the control plane is %q", config, address)
		}
	}
}

// TestMeshConfig checks that the settings of the mesh config about DNS reach the agent, that those of the pod's annotation
// and of injection precede them, and that they go with the mesh config.
func TestMeshConfig(t *testing.T) { // I12
	t.Parallel()
	const off, vips = "ISTIO_META_DNS_CAPTURE=false", "ISTIO_META_DNS_AUTO_ALLOCATE=true"
	mesh := map[string]string{"ISTIO_META_DNS_CAPTURE": "false", "ISTIO_META_DNS_AUTO_ALLOCATE": "true", "OTHER": "x"}
	for _, test := range []struct {
		annotation, sidecar string
		mesh                map[string]string
		want                []string
	}{
		{"", "", mesh, []string{off}}, // nothing carries connections to VIPs
		{"", ", {name: istio-proxy}", mesh, []string{vips, off}},
		{"proxyMetadata: {ISTIO_META_DNS_CAPTURE: 'true'}", ", {name: istio-proxy}", mesh, []string{vips}},
		{"proxyMetadata:\n  ISTIO_META_DNS_AUTO_ALLOCATE: 'false'", ", {name: istio-proxy}", mesh, []string{off}},
		{"", "", map[string]string{"ISTIO_META_DNS_CAPTURE": "maybe"}, nil}, // the agent would not start
	} {
		text := fmt.Sprintf("metadata: {name: app, annotations: {proxy.istio.io/config: %q}}\nspec: {containers: [{name: app}%s]}\n", test.annotation, test.sidecar)
		first := injectText(t, text, inject.Config{ProxyMetadata: test.mesh})
		var got []string
		for name, value := range variables(typed(t, first).Spec.InitContainers[0]) {
			if strings.HasPrefix(name, "ISTIO_") || name == "OTHER" {
				got = append(got, name+"="+value)
			}
		}
		slices.Sort(got)
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%+v (-want +got):\n%s", test, diff)
		}
		if diff := cmp.Diff(injectText(t, text, inject.Config{}), injectText(t, first, inject.Config{})); diff != "" {
			t.Errorf("%+v, without a mesh config: %s", test, diff)
		}
	}
}

// TestResolv checks resolv.conf of mode resolv, and that mode rules restores what the pod had.
func TestResolv(t *testing.T) { // I0, I11
	t.Parallel()
	for name, test := range map[string]struct {
		dns       string
		want      corev1.PodDNSConfig
		upstreams string
	}{
		"ClusterFirst": {
			dns:       "",
			want:      corev1.PodDNSConfig{Searches: []string{"shop.svc.cluster.local", "svc.cluster.local", "cluster.local"}, Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr("5")}}},
			upstreams: "10.96.0.10",
		},
		"with own": {
			dns: "  dnsPolicy: ClusterFirst\n  dnsConfig: {nameservers: [192.0.2.1], searches: [corp.example, svc.cluster.local], options: [{name: ndots, value: '2'}, {name: use-vc}]}\n",
			want: corev1.PodDNSConfig{
				Searches: []string{"shop.svc.cluster.local", "svc.cluster.local", "cluster.local", "corp.example"},
				Options:  []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr("2")}, {Name: "use-vc"}},
			},
			upstreams: "10.96.0.10,192.0.2.1",
		},
		"None": {
			dns:       "  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.1], searches: [corp.example]}\n",
			want:      corev1.PodDNSConfig{Searches: []string{"corp.example"}},
			upstreams: "192.0.2.1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			text := injectText(t, plain+test.dns, resolv)
			pod := typed(t, text)
			test.want.Nameservers = []string{"127.0.0.1"}
			if diff := cmp.Diff(&test.want, pod.Spec.DNSConfig); diff != "" || pod.Spec.DNSPolicy != corev1.DNSNone {
				t.Errorf("%s: %s", pod.Spec.DNSPolicy, diff)
			}
			agent := pod.Spec.InitContainers[0]
			if got := variables(agent); got["NAMETAP_UPSTREAM"] != test.upstreams || got["NAMETAP_DNS_ADDR"] != "127.0.0.1:53" {
				t.Errorf("the agent has the settings %v", got)
			}
			// kubelet starts no other container before the agent is ready, and does not wait for the period
			// of a startup probe.
			if hook := agent.Lifecycle.PostStart.Exec; !slices.Contains(hook.Command, "--wait") || agent.StartupProbe != nil {
				t.Errorf("kubelet waits by %v and %v", hook, agent.StartupProbe)
			}
			restricted(t, pod)
			if diff := cmp.Diff(injected(t, plain+test.dns, inject.Config{}), injected(t, text, inject.Config{})); diff != "" {
				t.Errorf("mode rules at once (-) and after mode resolv (+):\n%s", diff)
			}
			if diff := cmp.Diff(pod, injected(t, injectText(t, plain+test.dns, inject.Config{}), resolv)); diff != "" {
				t.Errorf("mode resolv at once (-) and after mode rules (+):\n%s", diff)
			}
		})
	}
}

// restricted fails the test unless what was added is allowed by the Pod Security level restricted.
func restricted(t *testing.T, pod corev1.Pod) {
	t.Helper()
	want := []corev1.Sysctl{{Name: "net.ipv4.ip_unprivileged_port_start", Value: "53"}}
	if diff := cmp.Diff(want, pod.Spec.SecurityContext.Sysctls); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"nametap", "prepare"}, names(pod.Spec.InitContainers)); diff != "" {
		t.Error(diff)
	}
	rights := pod.Spec.InitContainers[0].SecurityContext
	if !*rights.RunAsNonRoot || *rights.RunAsUser == 0 || *rights.AllowPrivilegeEscalation || len(rights.Capabilities.Add) > 0 ||
		!slices.Equal(rights.Capabilities.Drop, []corev1.Capability{"ALL"}) || rights.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("%v", rights)
	}
}

// TestEditedDNS checks that another injection keeps what was changed in dnsPolicy and dnsConfig since the
// first one, and replaces what that has added.
func TestEditedDNS(t *testing.T) { // I2, I11
	t.Parallel()
	other := resolv
	other.Nameservers, other.ClusterDomain = []string{"10.0.0.10"}, "corp.example"
	const own = "  dnsPolicy: ClusterFirst\n  dnsConfig: {nameservers: [192.0.2.1], searches: [a.example, b.example], options: [{name: timeout, value: '1'}, {name: use-vc}]}\n"
	for name, test := range map[string]struct {
		dns  string
		edit func(*corev1.PodSpec)
		want string // of the pod without injection
	}{
		"nothing": {own, func(*corev1.PodSpec) {}, own},
		"added": {
			own, func(s *corev1.PodSpec) {
				s.DNSConfig.Nameservers = append(s.DNSConfig.Nameservers, "192.0.2.2", "192.0.2.1")
				s.DNSConfig.Searches = append([]string{"c.svc.cluster.local"}, append(s.DNSConfig.Searches, "d.example")...)
				s.DNSConfig.Options = append(s.DNSConfig.Options, corev1.PodDNSConfigOption{Name: "edns0"}, corev1.PodDNSConfigOption{Name: "attempts", Value: ptr("2")})
			},
			"  dnsPolicy: ClusterFirst\n  dnsConfig: {nameservers: [192.0.2.1, 192.0.2.2], searches: [a.example, b.example, c.svc.cluster.local, d.example], " +
				"options: [{name: timeout, value: '1'}, {name: use-vc}, {name: edns0}, {name: attempts, value: '2'}]}\n",
		},
		"added to a pod without any": {
			"", func(s *corev1.PodSpec) { s.DNSConfig.Searches = append(s.DNSConfig.Searches, "d.example") },
			"  dnsConfig: {searches: [d.example]}\n",
		},
		"removed and changed": {
			own, func(s *corev1.PodSpec) {
				s.DNSConfig.Searches = slices.DeleteFunc(s.DNSConfig.Searches, func(v string) bool { return v == "a.example" })
				s.DNSConfig.Options = []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr("2")}, {Name: "timeout", Value: ptr("3")}}
			},
			"  dnsPolicy: ClusterFirst\n  dnsConfig: {nameservers: [192.0.2.1], searches: [b.example], options: [{name: ndots, value: '2'}, {name: timeout, value: '3'}]}\n",
		},
		"None": {
			"  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.1], options: [{name: use-vc}]}\n", func(s *corev1.PodSpec) {
				s.DNSConfig.Searches = []string{"a.example"}
				s.DNSConfig.Options = append(s.DNSConfig.Options, corev1.PodDNSConfigOption{Name: "ndots", Value: ptr("5")})
			},
			"  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.1], searches: [a.example], options: [{name: use-vc}, {name: ndots, value: '5'}]}\n",
		},
		"another policy": {
			"  dnsPolicy: None\n  dnsConfig: {nameservers: [192.0.2.1]}\n", func(s *corev1.PodSpec) { s.DNSPolicy = corev1.DNSClusterFirst },
			"  dnsPolicy: ClusterFirst\n  dnsConfig: {nameservers: [192.0.2.1]}\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := typed(t, injectText(t, plain+test.dns, resolv))
			test.edit(&pod.Spec)
			text, err := kyaml.Marshal(pod)
			if err != nil {
				t.Fatal(err)
			}
			for _, cfg := range []inject.Config{resolv, other, {}} {
				if diff := cmp.Diff(injected(t, plain+test.want, cfg), injected(t, string(text), cfg)); diff != "" {
					t.Errorf("the edited pod at once (-) and injected before (+), %+v:\n%s", cfg, diff)
				}
			}
			if diff := cmp.Diff(injected(t, plain+test.want, inject.Config{}), injected(t, injectText(t, string(text), other), inject.Config{})); diff != "" {
				t.Errorf("without mode resolv again:\n%s", diff)
			}
		})
	}
}

func ptr[T any](v T) *T { return &v }

// TestSysctlOfPod checks that a sysctl of the pod stays, if the agent can use port 53 with it.
func TestSysctlOfPod(t *testing.T) { // I11
	t.Parallel()
	sysctl := func(value string) string {
		return plain + "  securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: '" + value + "'}]}\n"
	}
	text := injectText(t, sysctl("0"), resolv)
	back := injected(t, text, inject.Config{})
	want := []corev1.Sysctl{{Name: "net.ipv4.ip_unprivileged_port_start", Value: "0"}}
	if diff := cmp.Diff([][]corev1.Sysctl{want, want}, [][]corev1.Sysctl{typed(t, text).Spec.SecurityContext.Sysctls, back.Spec.SecurityContext.Sysctls}); diff != "" {
		t.Error(diff)
	}
	refused(t, sysctl("1024"), resolv, `sets the sysctl net.ipv4.ip_unprivileged_port_start to "1024"`)
	for _, value := range []string{"54", "-1", "+1", "", "0x10"} {
		refused(t, sysctl(value), resolv, "sets the sysctl")
	}
	// kubelet takes this for the same name.
	slashes := strings.NewReplacer("net.ipv4.ip", "net/ipv4/ip")
	refused(t, slashes.Replace(sysctl("1024")), resolv, `sets the sysctl net.ipv4.ip_unprivileged_port_start to "1024"`)
	if list := injected(t, slashes.Replace(sysctl("0")), resolv).Spec.SecurityContext.Sysctls; len(list) != 1 || list[0].Value != "0" {
		t.Errorf("sysctls %v", list)
	}
}
