package inject_test

import (
	"strings"
	"testing"

	kyaml "sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

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

// BenchmarkAdmit measures the injection of a small pod by the webhook, and of the largest.
func BenchmarkAdmit(b *testing.B) {
	small, err := kyaml.YAMLToJSON([]byte(plain))
	if err != nil {
		b.Fatal(err)
	}
	large := `{"x": [` + strings.Repeat(`{"":0}, `, 24_980) + `0], "spec": {"containers": [{"name": "app"}]}}`
	for name, object := range map[string]string{"small": string(small), "large": large} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := inject.Admit([]byte(object), shop, inject.Config{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
