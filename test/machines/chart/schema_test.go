package chart

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	kyaml "sigs.k8s.io/yaml"
)

// TestNull gives null to each value: it is empty if it is a list or a map, or refused with a sentence.
func TestNull(t *testing.T) { // P9
	text, err := os.ReadFile(filepath.Join(chart, "values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var defaults map[string]any
	if err := kyaml.Unmarshal(text, &defaults); err != nil {
		t.Fatal(err)
	}
	versions(t, func(h helm) {
		t := h.t
		var walk func(path []string, values map[string]any)
		walk = func(path []string, values map[string]any) {
			for key, value := range values {
				path := append(slices.Clone(path), key)
				section, isMap := value.(map[string]any)
				if isMap {
					walk(path, section)
				}
				name := strings.Join(path, ".")
				_, err := h.template("{" + strings.Join(path, ": {") + ": null" + strings.Repeat("}", len(path)))
				missing := "missing property '" + key + "'" // of an object of Kubernetes
				if err != nil && !strings.Contains(err.Error(), name+" is null: leave it out to have its default") && !strings.Contains(err.Error(), missing) {
					t.Errorf("%s: %v", name, err)
				}
				if _, isList := value.([]any); err == nil && !isMap && !isList && !strings.Contains(name, "podAnnotations.") && !strings.Contains(name, "resources.") {
					t.Errorf("%s: null is accepted", name)
				}
			}
		}
		walk(nil, defaults)
	})
}

// TestClosed checks that the schema refuses unknown keys everywhere: each of its objects lists its keys, or says
// what the values of all keys are.
func TestClosed(t *testing.T) { // P9
	text, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	// Objects of Kubernetes, which the API server checks, and the values of a parent chart.
	free := []string{"/global", "/affinity/nodeAffinity", "/affinity/podAffinity", "/affinity/podAntiAffinity"}
	seen := 0
	var walk func(path string, node map[string]any)
	walk = func(path string, node map[string]any) {
		if node["type"] == "object" && !slices.Contains(free, path) {
			seen++
			if _, ok := node["additionalProperties"]; !ok {
				t.Errorf("%s: unknown keys are accepted", path)
			}
		}
		properties, _ := node["properties"].(map[string]any)
		for name, child := range properties {
			walk(path+"/"+name, child.(map[string]any))
		}
	}
	walk("", schema)
	for name, definition := range schema["definitions"].(map[string]any) {
		walk("/"+name, definition.(map[string]any))
	}
	if seen < 5 {
		t.Errorf("the schema has only %d objects", seen)
	}
}
