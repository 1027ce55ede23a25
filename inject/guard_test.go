package inject_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/inject"
)

// confined is a pod that cannot get around a guard.
const confined = `
metadata: {name: app}
spec:
  initContainers: [{name: prepare, image: app, securityContext: {capabilities: {drop: [ALL]}}}]
  containers: [{name: app, image: app, securityContext: {capabilities: {drop: [all], add: [NET_BIND_SERVICE]}}}]
`

// guardOf returns the ConfigMap with the policy of a pod's guard; "" without a guard. Both containers of nametap have the
// policy and the same settings, or none of them.
func guardOf(t *testing.T, pod corev1.Pod) string {
	t.Helper()
	configMap := ""
	for _, v := range pod.Spec.Volumes {
		if v.Name == "nametap-guard" && v.ConfigMap.Optional == nil && v.ConfigMap.Items[0] == (corev1.KeyToPath{Key: "policy.yaml", Path: "policy.yaml"}) {
			configMap = v.ConfigMap.Name
		}
	}
	for _, c := range pod.Spec.InitContainers {
		want := map[bool][4]string{true: {"/etc/nametap/guard/policy.yaml", "true", "true", "true"}}[configMap != "" && strings.HasPrefix(c.Name, "nametap")]
		mounted := ""
		for _, m := range c.VolumeMounts {
			if m.Name == "nametap-guard" && m.MountPath == "/etc/nametap/guard" && m.ReadOnly {
				mounted = "true"
			}
		}
		values := variables(c)
		if got := [4]string{values["NAMETAP_GUARD"], values["NAMETAP_EGRESS"], values["NAMETAP_CAPTURE_ENABLED"], mounted}; got != want {
			t.Errorf("%s: guard, egress, capture, mount: %q, want %q", c.Name, got, want)
		}
	}
	return configMap
}

// TestGuard checks that the annotation of the pod precedes the annotation of its namespace, which precedes the setting, and
// that a later injection without a guard removes it.
func TestGuard(t *testing.T) { // I21
	t.Parallel()
	for _, test := range []struct{ pod, namespace, setting, want string }{
		{"-", "-", "", ""}, {"-", "-", "set", "set"}, {"-", "space", "set", "space"}, {"own", "space", "set", "own"}, {"", "space", "set", ""}, {"-", "", "set", ""},
	} {
		cfg := inject.Config{Guard: test.setting}
		if test.setting != "" {
			cfg.Settings = map[string]string{"egress": "false", "capture-enabled": "false"}
		}
		ns := inject.Namespace{}
		if test.namespace != "-" {
			ns.Annotations = map[string]string{"nametap.dev/guard": test.namespace}
		}
		text := confined
		if test.pod != "-" {
			text = strings.Replace(text, "name: app}", "name: app, annotations: {nametap.dev/guard: '"+test.pod+"'}}", 1)
		}
		if test.want == "" {
			cfg.Settings = nil
		}
		pod, refusal := in(t, ns, text, cfg)
		if got := guardOf(t, pod); refusal != "" || got != test.want {
			t.Errorf("%+v: %q %s", test, got, refusal)
		}
	}
	guarded := injectText(t, confined, inject.Config{Guard: "set"})
	if got := injectText(t, guarded, inject.Config{}); got != injectText(t, confined, inject.Config{}) {
		t.Errorf("without the setting:\n%s", got)
	}
	if got := guardOf(t, injected(t, injectText(t, confined, inject.Config{}), inject.Config{Guard: "later"})); got != "later" {
		t.Errorf("with the setting in a second injection: %q", got)
	}
}

// TestGuardRefuses checks which pods would get around the rules of a guard.
func TestGuardRefuses(t *testing.T) { // I21
	t.Parallel()
	guarded := inject.Config{Guard: "policy"}
	const usual, app = "NET_RAW, SETGID, SETUID", "metadata: {name: app}\nspec:\n"
	container := func(fields string) string { return app + "  containers: [{name: app, image: app" + fields + "}]\n" }
	rights := func(fields string) string { return container(", securityContext: {" + fields + "}") }
	for text, want := range map[string]string{
		container(""): usual,
		rights("allowPrivilegeEscalation: false"):                                                              usual,
		rights("runAsUser: 1000"):                                                                              usual,
		rights("runAsUser: 0, allowPrivilegeEscalation: false"):                                                usual,
		rights("privileged: true"):                                                                             "is privileged",
		rights("privileged: true, capabilities: {drop: [ALL]}"):                                                "is privileged",
		rights("capabilities: {drop: [NET_RAW]}"):                                                              "SETGID, SETUID",
		rights("capabilities: {drop: [ALL], add: [NET_ADMIN]}"):                                                "NET_ADMIN",
		rights("capabilities: {drop: [ALL], add: [cap_net_raw]}"):                                              "NET_RAW",
		rights("capabilities: {add: [ALL]}"):                                                                   "BPF, NET_ADMIN",
		rights("runAsUser: 1337, capabilities: {drop: [ALL]}"):                                                 "runs as user 1337",
		rights("runAsGroup: 1337, capabilities: {drop: [ALL]}"):                                                "runs as group 1337",
		confined + "  securityContext: {fsGroup: 1337}\n":                                                      "the group 1337",
		confined + "  securityContext: {supplementalGroups: [1337]}":                                           "the group 1337",
		confined + "  securityContext: {runAsUser: 1337}\n":                                                    "runs as user 1337",
		confined + "  ephemeralContainers: [{name: debug, image: a}]":                                          `container "debug" has the capabilities ` + usual,
		confined + "  hostNetwork: true\n":                                                                     "the network of its node",
		istio(t, confined):                                                                                     "Istio's proxy",
		strings.Replace(confined, "{name: app}", "{name: app, labels: {istio.io/dataplane-mode: ambient}}", 1): "Istio's proxy",
		strings.Replace(confined, "{name: app}", "{name: app, annotations: {nametap.dev/guard: A_B}}", 1):      "want the name of a ConfigMap",
		strings.Replace(confined, "{name: app}", "{name: app, annotations: {nametap.dev/mode: resolv}}", 1):    "without rules a guard is advice",
		confined + "  volumes: [{name: nametap-guard, emptyDir: {}}]\n":                                        `volume "nametap-guard"`,
	} {
		cfg := guarded
		if strings.Contains(text, "hostNetwork") {
			if result, err := inject.Pod(parse(t, text), shop, cfg); err != nil || result.Outcome != inject.Skipped {
				t.Errorf("with the setting, %v %v\n%s", result, err, text)
			}
			text = strings.Replace(text, "{name: app}", "{name: app, annotations: {nametap.dev/guard: policy}}", 1)
		}
		refused(t, text, cfg, want)
	}
	for _, text := range []string{
		confined, rights("capabilities: {drop: [NET_RAW, SETUID, SETGID]}"), rights("runAsUser: 1000, allowPrivilegeEscalation: false"),
		rights("runAsNonRoot: true, allowPrivilegeEscalation: false"),
		app + "  securityContext: {runAsUser: 1000}\n  containers: [{name: app, image: app, securityContext: {allowPrivilegeEscalation: false}}]\n",
	} {
		guardOf(t, injected(t, text, guarded))
	}
	if err := (inject.Config{Guard: "policy", Mode: inject.Resolv, Nameservers: []string{"10.96.0.10"}}).Check(); err == nil || !strings.Contains(err.Error(), "advice") {
		t.Error(err)
	}
	if err := (inject.Config{Settings: map[string]string{"guard": "/policy"}}).Check(); err == nil || !strings.Contains(err.Error(), "follows from: guard") {
		t.Error(err)
	}
}

// TestGuardOfManifest checks that a policy becomes a ConfigMap in each namespace, that its name follows from its content, and
// that a later injection keeps it.
func TestGuardOfManifest(t *testing.T) { // I21
	t.Parallel()
	pod := func(meta string) string {
		return "apiVersion: v1\nkind: Pod" + strings.Replace(confined, "{name: app}", "{name: app"+meta+"}", 1)
	}
	text := strings.Join([]string{pod(""), pod(", namespace: a"), pod(", namespace: a"), pod(", namespace: b"), pod(", namespace: c, labels: {nametap.dev/inject: 'false'}")}, "---\n")
	manifest := func(text string, policy []byte) string {
		t.Helper()
		out, reports, err := inject.Manifest([]byte(text), "shop", inject.Config{Policy: policy})
		if err != nil || len(reports) < 5 || reports[0].Outcome != inject.Injected {
			t.Fatal(err, reports)
		}
		return string(out)
	}
	first := manifest(strings.TrimSuffix(text, "\n"), []byte("mode: audit\nallow: # none\n"))
	_, documents, _ := strings.Cut(first, "inject: 'false'")
	const name = "nametap-guard-NAME"
	_, hash, _ := strings.Cut(documents, "name: nametap-guard-")
	hash = hash[:10]
	documents = strings.ReplaceAll(documents, hash, "NAME")
	object := "---\napiVersion: v1\ndata:\n  policy.yaml: |\n    mode: audit\n    allow: # none\nimmutable: true\nkind: ConfigMap\nmetadata:\n  name: " + name
	if _, got, _ := strings.Cut(documents, "---\n"); "---\n"+got != object+"\n"+object+"\n  namespace: a\n"+object+"\n  namespace: b\n" {
		t.Errorf("the ConfigMaps are:\n%s", got)
	}
	if n := strings.Count(first, "nametap.dev/guard: nametap-guard-"+hash); n != 4 {
		t.Errorf("%d pods have the annotation, want 4\n%s", n, first)
	}
	if again := manifest(first, []byte("mode: audit\nallow: # none\n")); again != first {
		t.Errorf("a second injection:\n%s", again)
	}
	if later := manifest(first, nil); later != first {
		t.Errorf("a later injection without a policy:\n%s", later)
	}
	const asJSON = `{"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "app", "securityContext": {"capabilities": {"drop": ["ALL"]}}}]}}`
	if out, _, err := inject.Manifest([]byte(asJSON), "shop", inject.Config{Policy: []byte("mode: enforce\n")}); err != nil || !strings.HasPrefix(string(out), "---\n{") {
		t.Errorf("kubectl reads a text that begins with { as JSON to its end: %v\n%s", err, out)
	}
	sandbox := "apiVersion: example.com/v1\nkind: Sandbox\nspec: {podTemplate: {spec: {containers: [{name: app, image: app}]}}}\n"
	if _, reports, err := inject.Manifest([]byte(sandbox), "shop", inject.Config{Policy: []byte("mode: enforce\n")}); err != nil || reports[0].Outcome != inject.Refused {
		t.Error("an unknown kind:", err, reports)
	}
	if other := manifest(first, []byte("mode: enforce\n")); strings.Contains(other, "guard: nametap-guard-"+hash) || strings.Count(other, "kind: ConfigMap") != 6 {
		t.Errorf("another policy:\n%s", other)
	}
}
