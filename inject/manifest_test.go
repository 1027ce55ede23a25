package inject_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

var update = flag.Bool("update", false, "write the results in testdata")

// modes are the Configs of the golden files, by the directory.
func modes() map[string]inject.Config {
	discovery := resolv
	discovery.ControlPlane, discovery.RootCert = "nametap-discovery.nametap-system.svc:15012", "nametap-ca-root-cert"
	return map[string]inject.Config{"rules": {}, "resolv": discovery}
}

// inputs returns the manifests in testdata/in, by their names.
func inputs(tb testing.TB) map[string][]byte {
	tb.Helper()
	files, err := filepath.Glob("testdata/in/*")
	if err != nil || len(files) == 0 {
		tb.Fatalf("%v, %v", files, err)
	}
	texts := map[string][]byte{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			tb.Fatal(err)
		}
		texts[filepath.Base(file)] = text
	}
	return texts
}

// manifest injects a manifest, without errors. It returns the text and the lines of the reports.
func manifest(t *testing.T, text []byte, cfg inject.Config) (out []byte, lines string) {
	t.Helper()
	out, reports, err := inject.Manifest(text, "default", cfg)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	var list strings.Builder
	for _, r := range reports {
		fmt.Fprintf(&list, "%d: %s: %s: %s\n", r.Line, r.Object, r.Outcome, strings.Join(r.Reasons, "; "))
	}
	return out, list.String()
}

// TestGolden injects the manifests of testdata/in and compares the results with the mode's
// directory. With -update it writes them. A second injection changes nothing, the API's types accept the workloads, and
// each mode can follow the other.
func TestGolden(t *testing.T) { // I2, I4, I6, I13
	t.Parallel()
	for mode, cfg := range modes() {
		for name, text := range inputs(t) {
			t.Run(mode+"/"+name, func(t *testing.T) {
				t.Parallel()
				out, lines := manifest(t, text, cfg)
				golden(t, filepath.Join("testdata", mode, name), out)
				golden(t, filepath.Join("testdata", mode, name+".txt"), []byte(lines))
				again, _ := manifest(t, out, cfg)
				if diff := cmp.Diff(string(out), string(again)); diff != "" {
					t.Errorf("a second injection:\n%s", diff)
				}
				checkTypes(t, out)
				for other, otherConfig := range modes() {
					there, _ := manifest(t, out, otherConfig)
					back, _ := manifest(t, there, cfg)
					if diff := cmp.Diff(objects(t, out), objects(t, back)); diff != "" {
						t.Errorf("after the mode %s:\n%s", other, diff)
					}
				}
			})
		}
	}
}

// golden compares a text with a file.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil { //nolint:gosec // test data
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil { //nolint:gosec // test data
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// documents returns the documents of a manifest.
func documents(text []byte) []string {
	return regexp.MustCompile(`(?m)^(---.*|%.*|\.\.\.)\r?$`).Split(string(text), -1)
}

// objects returns the contents of a manifest.
func objects(t *testing.T, text []byte) (all []any) {
	t.Helper()
	for _, document := range documents(text) {
		var object any
		read := func(text []byte, v any) error { return kyaml.Unmarshal(text, v) }
		if json.Valid([]byte(document)) {
			read = json.Unmarshal
		}
		if err := read([]byte(document), &object); err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		all = append(all, withoutEmpty(object))
	}
	return all
}

// withoutEmpty removes each empty securityContext, which the API server adds where there is none.
func withoutEmpty(object any) any {
	switch object := object.(type) {
	case []any:
		for i := range object {
			object[i] = withoutEmpty(object[i])
		}
	case map[string]any:
		for key, value := range object {
			object[key] = withoutEmpty(value)
			if fields, ok := value.(map[string]any); ok && key == "securityContext" && len(fields) == 0 {
				delete(object, key)
			}
		}
	}
	return object
}

// checkTypes reads the workloads of a manifest strictly, as the API server does.
func checkTypes(t *testing.T, text []byte) {
	t.Helper()
	types := map[string]func() any{
		"Deployment": func() any { return new(appsv1.Deployment) }, "StatefulSet": func() any { return new(appsv1.StatefulSet) },
		"DaemonSet": func() any { return new(appsv1.DaemonSet) }, "ReplicaSet": func() any { return new(appsv1.ReplicaSet) },
		"Job": func() any { return new(batchv1.Job) }, "CronJob": func() any { return new(batchv1.CronJob) },
		"Pod": func() any { return new(corev1.Pod) }, "PodTemplate": func() any { return new(corev1.PodTemplate) },
		"ReplicationController": func() any { return new(corev1.ReplicationController) },
	}
	for _, object := range objects(t, text) {
		fields, _ := object.(map[string]any)
		kind, _ := fields["kind"].(string)
		if make, ok := types[kind]; ok && fields["apiVersion"] != "batch.volcano.sh/v1alpha1" {
			text, err := kyaml.Marshal(object)
			if err == nil {
				err = kyaml.UnmarshalStrict(text, make())
			}
			if err != nil {
				t.Errorf("%v\n%s", err, text)
			}
		}
	}
}

// TestUnchanged checks that documents without a pod to inject stay byte for byte, also beside one.
func TestUnchanged(t *testing.T) { // I13
	t.Parallel()
	texts := inputs(t)
	out, lines := manifest(t, texts["unchanged.yaml"], inject.Config{})
	if diff := cmp.Diff(string(texts["unchanged.yaml"]), string(out)); diff != "" {
		t.Error(diff)
	}
	if strings.Contains(lines, ": injected") || strings.Count(lines, ": skipped: ") != 8 {
		t.Errorf("the reports are\n%s", lines)
	}
	out, _ = manifest(t, slices.Concat(texts["unchanged.yaml"], texts["workloads.yaml"]), inject.Config{})
	if !bytes.HasPrefix(out, texts["unchanged.yaml"]) {
		t.Errorf("%s", out)
	}
}

// TestForms checks that characters that YAML takes for line breaks, or refuses, stay.
func TestForms(t *testing.T) { // I13
	t.Parallel()
	const text = "--- {apiVersion: v1, kind: Pod, metadata: {name: app}, spec: {containers: [{name: app, image: app, workingDir: \"a\\N\\L\\x7fb\"}]}}\n...\n"
	if out, _ := manifest(t, []byte(text), inject.Config{}); !bytes.Contains(out, []byte(`workingDir: "a\N\L\x7Fb"`)) {
		t.Errorf("%s", out)
	}
}

// TestErrors checks that errors name their line, and that all are reported.
func TestErrors(t *testing.T) { // I13
	t.Parallel()
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: app}\nspec: {containers: [{name: app, image: app}]}\n"
	const jsonPod = `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"app"},"spec":{"containers":[{"name":"app","image":"app"}]}}`
	for text, want := range map[string]string{
		pod + "---\nkind: Pod\n  a: b\n":                            "line 7: ",
		pod + "---\n{\n":                                            "line ",
		pod + "---\na:\n  b: {c: d\ne: f\n":                         "line 7: did not find expected ',' or '}'",
		pod + "---\na: \"\n---\nb\"\n":                              "line 7: ",
		"a: *b\n":                                                   "unknown anchor",
		pod + "---\n" + strings.Replace(pod, "[{", "[x, {", 1):      "line 6: Pod default/app: not a valid pod: spec.containers: Kubernetes takes no string there",
		strings.Replace(pod, "{name: app}", "[]", 1):                "not a valid pod",
		strings.Replace(pod, "{name: app}", "{labels: {a: []}}", 1): "metadata.labels: Kubernetes takes no array there",
		"\xff":       "line ",
		"\x00\x01":   "line ",
		"a: {{ x }}": "",
		// Fields that would be lost, or would be there twice.
		jsonPod + jsonPod:                              "line 1: ",
		jsonPod + "\n" + jsonPod:                       "write a line --- before a second one",
		pod + "---\n" + jsonPod + " more":              "write a line --- before a second one",
		"[1]\n[2]\n":                                   "write a line --- before a second one",
		pod + "---\ndata:\n  a: b\n  \"a\": c\n":       `line 8: mapping key "a" is in this object twice`,
		pod + "---\n<<: {a: b}\n<<: {c: d}\n":          `line 7: mapping key "<<" is in this object twice`,
		pod + "x: &x {b: *x}\n":                        "line 1: document that begins here: anchor 'x' value contains itself",
		"apiVersion: v1\nkind: List\nitems: &x [*x]\n": "anchor 'x' value contains itself",
		"kind: List\napiVersion: v1\na: &a [" + strings.Repeat("x,", 1001) + "]\nb: &b [" + strings.Repeat("*a,", 1001) + "]\nitems: *b\n": "excessive aliasing",
	} {
		out, _, err := inject.Manifest([]byte(text), "default", inject.Config{})
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q\n%s", text, err, want, out)
		}
	}
	bad := strings.Replace(pod, "[{", "[x, {", 1)
	_, _, err := inject.Manifest([]byte(bad+"---\n"+bad), "default", inject.Config{})
	if err == nil || strings.Count(err.Error(), "not a valid pod") != 2 {
		t.Errorf("%v, want two errors", err)
	}
	if _, _, err := inject.Manifest(nil, "default", inject.Config{Mode: "cni"}); err == nil {
		t.Error("no error about the mode")
	}
}

// FuzzManifest checks that no text makes Manifest panic, that a second injection changes nothing, and
// that documents without a pod stay.
func FuzzManifest(f *testing.F) { // I2, I13
	for _, text := range inputs(f) {
		f.Add(text)
		for _, document := range bytes.Split(text, []byte("---\n")) {
			f.Add(document)
		}
	}
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers:\n  - name: app\n    image: app\n"
	for _, text := range []string{
		"\ufeff" + pod, strings.ReplaceAll(pod, "\n", "\r\n"), strings.ReplaceAll(pod, "name: ", "name:\t"), strings.ReplaceAll(pod, "metadata", "# \u2028\nmetadata"),
		pod + "    args:\n    - |+\n      a\n      # b\n\n\n", pod + "  -\n    name: b\n  - # c\n    name: c\n", strings.ReplaceAll(pod, "kind: Pod", "? kind\n: Pod"),
		"x: &x {name: app}\n" + pod + "  - <<: *x\n    image: b\n  - <<: [*x]\n    name: istio-proxy\n    env: []\n",
		"apiVersion: v1\nkind: Pod\nspec: {\n  containers: [ # one\n    {name: app}, # two\n  ]\n} # three\n...\n# four\n",
		"apiVersion: v1\nkind: List\nitems:\n- &p {apiVersion: v1, kind: Pod, spec: &s {containers: [{name: a, env: &e [{name: A}]}]}}\n- *p\n- {apiVersion: v1, kind: Pod, spec: *s, x: *e}\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		for mode, cfg := range modes() {
			out, reports, err := inject.Manifest(text, "default", cfg)
			if err != nil {
				continue
			}
			injected := slices.ContainsFunc(reports, func(r inject.Report) bool { return r.Outcome == inject.Injected })
			if !injected && !bytes.Equal(text, out) {
				t.Errorf("%s: no pod is injected, and the text has changed:\n%q\n%q", mode, text, out)
			}
			again, second, err := inject.Manifest(out, "default", cfg)
			if err != nil || !bytes.Equal(out, again) {
				t.Errorf("%s: a second injection: %v\n%q\n%q\n%q", mode, err, text, out, again)
			}
			if len(second) != len(reports) {
				t.Errorf("%s: %d and %d reports", mode, len(reports), len(second))
			}
		}
	})
}

// TestJSONTexts checks that texts and numbers in JSON stay, also characters that YAML takes for line breaks, or
// refuses.
func TestJSONTexts(t *testing.T) { // I13
	t.Parallel()
	const value = "a \u0085 b \u2028 c\u2029\x7f \u009f \ufffe\U0001f600 \\ \" <&>"
	quoted, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	for name, written := range map[string]string{"plain": `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(value) + `"`, "escaped": string(quoted), "surrogates": strings.Replace(string(quoted), "\U0001f600", `\ud83d\ude00`, 1)} {
		text := `{"apiVersion": "v1", "kind": "List", "items": [
			{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"text": ` + written + `}, "x": [1e400, 12345678901234567890123, -0.0]},
			{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "app", "image": "app"}]}}]}`
		out, reports, err := inject.Manifest([]byte(text), "default", inject.Config{})
		if err != nil || len(reports) != 1 || reports[0].Outcome != inject.Injected {
			t.Errorf("%s: %v, %v", name, reports, err)
			continue
		}
		var list struct {
			Items []struct {
				Data struct{ Text string }
				X    json.RawMessage
			}
		}
		if err := json.Unmarshal(out, &list); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
		if got := list.Items[0].Data.Text; got != value {
			t.Errorf("%s: %q has become %q", name, value, got)
		}
		if got := strings.Join(strings.Fields(string(list.Items[0].X)), " "); got != "[ 1e400, 12345678901234567890123, -0.0 ]" {
			t.Errorf("%s: the numbers have become %s", name, got)
		}
	}
	if _, _, err := inject.Manifest([]byte("\n{\"kind\": \"\xff\"}"), "default", inject.Config{}); err == nil || !strings.Contains(err.Error(), "line ") {
		t.Errorf("%v", err)
	}
}

// TestNestedLists checks that Lists in Lists are read as kubectl reads them.
func TestNestedLists(t *testing.T) { // I13
	t.Parallel()
	const pod = "{apiVersion: v1, kind: Pod, metadata: {name: NAME, namespace: quiet}, spec: {containers: [{name: app, image: app}]}}"
	list := func(kind string, items ...string) string {
		return "{apiVersion: v1, kind: " + kind + ", items: [" + strings.Join(items, ", ") + "]}"
	}
	named := func(name string) string { return strings.Replace(pod, "NAME", name, 1) }
	text := list("List", named("a"), list("List", list("PodList", named("b"), strings.Replace(named("c"), "kind: Pod, ", "", 1)), named("d"))) + "\n"
	_, lines := manifest(t, []byte(text), inject.Config{})
	for _, name := range []string{"a", "b", "c", "d"} {
		if !strings.Contains(lines, "Pod quiet/"+name+": injected") {
			t.Errorf("%s is not injected:\n%s", name, lines)
		}
	}
	const namespace = "{apiVersion: v1, kind: Namespace, metadata: {name: quiet, labels: {nametap.dev/inject: disabled}}}"
	for _, text := range []string{list("List", list("NamespaceList", namespace), named("a")), list("List", list("List", namespace), named("a"))} {
		if out, lines := manifest(t, []byte(text), inject.Config{}); string(out) != text || !strings.Contains(lines, "skipped: the namespace's label") {
			t.Errorf("%s\n%s", lines, out)
		}
	}
}
