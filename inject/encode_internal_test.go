package inject

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	kyaml "sigs.k8s.io/yaml"
)

// TestEncode checks that trees say the same as the JSON of their values, for readers of YAML 1.1, too.
func TestEncode(t *testing.T) {
	t.Parallel()
	p := new(pod)
	p.Spec.Containers = []corev1.Container{{Name: istioProxy}}
	values := []any{
		volumes(DefaultConfig()), agentContainer(p, environment(p, nil, DefaultConfig()), DefaultConfig()), captureContainer(nil, DefaultConfig()),
		corev1.PodDNSConfig{}, []string{}, []corev1.Sysctl(nil), 9007199254740993,
	}
	for _, s := range []string{
		"", " ", "a", "y", "Yes", "no", "off", "true", "False", "null", "~", "1", "1.5", "0x1", "1e3", "1:30", "12:34:56", "-1", "+1", ".5", ".inf", "2020-01-01", "a: b", "a #b", "#a",
		"- a", "-", "?", "[a", "{a", "a\nb", "a\tb", "\"a\"", "'a'", "&a", "*a", "!a", "%a", "@a", "`a", "|", ">", "ü", "\u2028", "a\u0085b", "<<", "=", "metadata.annotations['x']", "10m", "128Mi", "--supervise",
	} {
		values = append(values, s, corev1.EnvVar{Name: s, Value: s}, map[string]string{"a": s})
	}
	for _, v := range values {
		want, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		text, err := yaml.Marshal(newNode(encode(v)))
		if err != nil {
			t.Fatal(err)
		}
		// kubectl reads YAML 1.1.
		if got, err := kyaml.YAMLToJSON(text); err != nil || !equal(t, want, got) {
			t.Errorf("%#v: %v\n%s, want\n%s", v, err, got, want)
		}
	}
}

// equal reports whether two texts in JSON have the same contents.
func equal(t *testing.T, a, b []byte) bool {
	t.Helper()
	var values [2]any
	for i, text := range [][]byte{a, b} {
		if err := json.Unmarshal(text, &values[i]); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
	}
	return cmp.Equal(values[0], values[1])
}
