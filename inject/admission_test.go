package inject_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/inject"
)

// patched applies a JSON patch to an object.
func patched(t *testing.T, object, patch []byte) string {
	t.Helper()
	var tree map[string]json.RawMessage
	var operations []struct {
		Op, Path string
		Value    json.RawMessage
	}
	if err := json.Unmarshal(object, &tree); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(patch, &operations); err != nil {
		t.Fatalf("%v: %s", err, patch)
	}
	for _, o := range operations {
		key, ok := strings.CutPrefix(o.Path, "/")
		if o.Op != "add" || !ok || strings.Contains(key, "/") {
			t.Errorf("operation %s of %s", o.Op, o.Path)
		}
		tree[key] = o.Value
	}
	text, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// I1: the patch makes the pod that Pod makes, and nothing is left to do then.
func TestAdmit(t *testing.T) {
	t.Parallel()
	const text = `{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"}, "spec": {"containers": [{"name": "web", "image": "web"}]}}`
	result, patch, err := inject.Admit([]byte(text), shop, inject.Config{})
	if err != nil || result.Outcome != inject.Injected {
		t.Fatalf("%+v, %v", result, err)
	}
	want, err := json.Marshal(result.Pod)
	if err != nil {
		t.Fatal(err)
	}
	got := patched(t, []byte(text), patch)
	if diff := cmp.Diff(typed(t, string(want)), typed(t, got)); diff != "" {
		t.Errorf("(-pod +patched):\n%s", diff)
	}
	if _, more, err := inject.Admit([]byte(got), shop, inject.Config{}); err != nil || more != nil {
		t.Errorf("a second patch: %s, %v", more, err)
	}
}

// TestAdmitErrors checks the errors about texts that are no pods.
func TestAdmitErrors(t *testing.T) { // I10
	t.Parallel()
	for text, want := range map[string]string{
		"":                       "EOF",
		"[]":                     "want an object",
		"1":                      "want an object",
		"{} {}":                  "want one object",
		`{"spec": {}}`:           "spec.containers is missing",
		`{"spec": `:              "EOF",
		`{"spec": "x"}`:          "not a valid pod",
		`{"a": nul}`:             "invalid",
		strings.Repeat("[", 2e4): "exceeded max depth",
		`{"a": [` + strings.Repeat("1,", 5e4) + `1]}`: "50002 brackets and commas: want at most 50000",
	} {
		if _, patch, err := inject.Admit([]byte(text), shop, inject.Config{}); err == nil || patch != nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %s %v, want %s", text, patch, err, want)
		}
	}
}
