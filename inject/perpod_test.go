package inject_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/inject"
)

// both are settings for pods of both modes.
var both = inject.Config{Nameservers: []string{"10.96.0.10"}}

// annotated returns a pod with annotations and labels.
func annotated(annotations, labels string) string {
	return "metadata: {name: app, annotations: {" + annotations + "}, labels: {" + labels + "}}\nspec: {containers: [{name: app, image: app}]}\n"
}

// in injects a pod in a namespace, twice, and returns it; or the reason why it is refused.
func in(t *testing.T, ns inject.Namespace, text string, cfg inject.Config) (pod corev1.Pod, refusal string) {
	t.Helper()
	ns.Name, ns.Requested = "shop", true
	result, err := inject.Pod(parse(t, text), ns, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if result.Outcome != inject.Injected {
		return pod, result.Reasons[0]
	}
	out := format(t, result.Pod)
	again, err := inject.Pod(parse(t, out), ns, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(out, format(t, again.Pod)); diff != "" { // I2
		t.Errorf("a second injection:\n%s", diff)
	}
	return typed(t, out), ""
}

// TestModeOfPod checks that the annotation of the pod precedes the annotation of its namespace,
// which precedes the setting.
func TestModeOfPod(t *testing.T) { // I16
	t.Parallel()
	for _, test := range []struct{ pod, namespace, want string }{
		{"", "", "rules"}, {"resolv", "", "resolv"}, {"", "resolv", "resolv"}, {"rules", "resolv", "rules"}, {"resolv", "rules", "resolv"},
	} {
		var ns inject.Namespace
		annotations := ""
		if test.namespace != "" {
			ns.Annotations = map[string]string{"nametap.dev/mode": test.namespace}
		}
		if test.pod != "" {
			annotations = "nametap.dev/mode: " + test.pod
		}
		pod, refusal := in(t, ns, annotated(annotations, ""), both)
		if refusal != "" || !strings.HasPrefix(pod.Annotations[inject.Status], `{"mode":"`+test.want+`"`) {
			t.Errorf("%+v: %s%s", test, pod.Annotations[inject.Status], refusal)
		}
	}
	for annotation, want := range map[string]string{"": "annotation nametap.dev/mode: mode", "cni": `mode "cni": want rules or resolv`} {
		if _, refusal := in(t, inject.Namespace{}, annotated("nametap.dev/mode: '"+annotation+"'", ""), both); !strings.Contains(refusal, want) {
			t.Errorf("%q: %s", annotation, refusal)
		}
	}
	if _, refusal := in(t, inject.Namespace{}, annotated("nametap.dev/mode: resolv", ""), inject.Config{}); !strings.Contains(refusal, "needs the addresses of the cluster's DNS") {
		t.Errorf("without nameservers: %s", refusal)
	}
}

// TestAmbient checks that the agent leaves ztunnel its port in a pod of Istio's ambient mode, and switches off its DNS
// capture.
func TestAmbient(t *testing.T) { // I17
	t.Parallel()
	const label = "istio.io/dataplane-mode"
	ambient := inject.Namespace{Labels: map[string]string{label: "ambient"}}
	own := both
	own.Settings = map[string]string{"dns-addr": "localhost:16000"}
	for _, test := range []struct {
		ns                inject.Namespace
		labels, address   string
		cfg               inject.Config
		istio, hasZtunnel bool
	}{
		{inject.Namespace{}, "", "", both, false, false},
		{inject.Namespace{}, label + ": ambient", "localhost:15056", both, false, true},
		{ambient, "", "localhost:15056", both, false, true},
		{ambient, label + ": none", "", both, false, false},
		{ambient, "", "", both, true, false},
		{ambient, "", "localhost:16000", own, false, true},
		{inject.Namespace{}, "", "localhost:16000", own, false, false},
		{ambient, "", "127.0.0.1:53", resolv, false, true},
	} {
		text := annotated("", test.labels)
		if test.istio {
			text = istio(t, text)
		}
		pod, refusal := in(t, test.ns, text, test.cfg)
		if refusal != "" {
			t.Fatal(refusal)
		}
		for _, c := range pod.Spec.InitContainers {
			if got := variables(c)["NAMETAP_DNS_ADDR"]; strings.HasPrefix(c.Name, "nametap") && got != test.address {
				t.Errorf("%+v: %s listens on %q", test, c.Name, got)
			}
		}
		if got := pod.Annotations["ambient.istio.io/dns-capture"] == "false"; got != test.hasZtunnel {
			t.Errorf("%+v: the DNS capture of ztunnel is off: %v", test, got)
		}
	}
	port := "metadata: {name: app, labels: {" + label + ": ambient}}\nspec: {containers: [{name: app, image: app, ports: [{containerPort: 15056}]}]}\n"
	if _, refusal := in(t, inject.Namespace{}, port, both); !strings.Contains(refusal, "the port 15056") {
		t.Errorf("the port of the agent is taken: %q", refusal)
	}
}

// TestOpenShift checks that the agent has a user of the range that OpenShift gives a namespace.
func TestOpenShift(t *testing.T) { // I18
	t.Parallel()
	for text, want := range map[string]int64{"1000650000/10000": 1000650001, "1000650000-1000659999": 1000650001, "7/1": 7, "": 0, "a/b": 0, "7": 0, "0/5": 0, "9-8": 0, "1/0": 0} {
		ns := inject.Namespace{Annotations: map[string]string{"openshift.io/sa.scc.uid-range": text}}
		pod, refusal := in(t, ns, plain, resolv)
		if want == 0 {
			if !strings.Contains(refusal, "want a range of users") {
				t.Errorf("%q: %s", text, refusal)
			}
			continue
		}
		if refusal != "" || *pod.Spec.InitContainers[0].SecurityContext.RunAsUser != want || *pod.Spec.InitContainers[0].SecurityContext.RunAsGroup != want {
			t.Errorf("%q: %s%+v", text, refusal, pod.Spec.InitContainers)
		}
		if _, refusal := in(t, ns, plain, both); !strings.Contains(refusal, "use the mode resolv") {
			t.Errorf("mode rules: %q", refusal)
		}
	}
}

// TestImagePullSecrets checks that Secrets are added beside the pod's own, and removed with the
// setting.
func TestImagePullSecrets(t *testing.T) { // I19
	t.Parallel()
	cfg := inject.Config{ImagePullSecrets: []string{"registry", "own"}}
	names := func(pod corev1.Pod) (list []string) {
		for _, s := range pod.Spec.ImagePullSecrets {
			list = append(list, s.Name)
		}
		return list
	}
	const own = "metadata: {name: app}\nspec: {imagePullSecrets: [{name: own}], containers: [{name: app, image: app}]}\n"
	first := injectText(t, own, cfg)
	if got := names(typed(t, first)); !slices.Equal(got, []string{"own", "registry"}) {
		t.Errorf("the Secrets are %q", got)
	}
	if got := names(injected(t, first, inject.Config{})); !slices.Equal(got, []string{"own"}) {
		t.Errorf("without the setting they are %q", got)
	}
	if got := names(injected(t, injectText(t, plain, cfg), inject.Config{})); got != nil {
		t.Errorf("without the setting they are %q", got)
	}
}
