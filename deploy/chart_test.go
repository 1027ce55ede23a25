package deploy

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// TestChartSchema checks that the schema of the chart has exactly the keys of the values. test/machines/chart has the
// tests that need the commands of Helm.
func TestChartSchema(t *testing.T) { // P9
	t.Parallel()
	var values map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "chart/values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal([]byte(read(t, "chart/values.schema.json")), &schema); err != nil {
		t.Fatal(err)
	}
	delete(schema["properties"].(map[string]any), "global") // of a parent chart
	sameKeys(t, "", values, schema)
}

// sameKeys compares the keys of values with the keys in their schema.
func sameKeys(t *testing.T, path string, values, schema map[string]any) {
	t.Helper()
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return // its keys are names
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(values)), slices.Sorted(maps.Keys(properties))); diff != "" {
		t.Errorf("keys of %s in values.yaml (-) and in the schema (+):\n%s", path, diff)
	}
	for key, value := range values {
		child, isMap := value.(map[string]any)
		described, isObject := properties[key].(map[string]any)
		if isMap && isObject {
			sameKeys(t, path+"/"+key, child, described)
		}
	}
}
