package deploy

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// TestChart checks what test/machines/chart, which has the commands of Helm, need not run for: the chart has the
// custom resources and the version of the manifests, and the schema has exactly the keys of the values.
func TestChart(t *testing.T) { // P9, P10
	t.Parallel()
	if diff := cmp.Diff(read(t, "kubernetes/crds.yaml"), read(t, "chart/crds/crds.yaml")); diff != "" {
		t.Errorf("kubernetes/crds.yaml (-) and chart/crds/crds.yaml (+):\n%s", diff)
	}
	var chart struct{ Version, AppVersion string }
	if err := yaml.Unmarshal([]byte(read(t, "chart/Chart.yaml")), &chart); err != nil {
		t.Fatal(err)
	}
	image := load(t, "discovery").deployment.Spec.Template.Spec.Containers[0].Image
	if want := "nametap-discovery:" + chart.AppVersion; image != want || chart.Version != chart.AppVersion {
		t.Errorf("the manifest has the image %s, and the chart the versions %+v", image, chart)
	}
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
