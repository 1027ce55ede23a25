package deploy

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/nametap/nametap/inject"
)

// examplePod returns the pod of a manifest. An unknown field of the pod fails the test.
func examplePod(t *testing.T, variant string) (pod corev1.Pod) {
	t.Helper()
	for document := range strings.SplitSeq(read(t, "kubernetes/"+variant+".yaml"), "\n---\n") {
		if !strings.Contains(document, "\nkind: Pod\n") {
			continue
		}
		if err := yaml.UnmarshalStrict([]byte(document), &pod); err != nil {
			t.Fatalf("%s: %v\n%s", variant, err, document)
		}
	}
	if len(pod.Spec.Containers) == 0 {
		t.Fatalf("%s has no pod", variant)
	}
	return pod
}

// TestInjectedEqualsManifest injects the application of each manifest, and compares
// the pod with the manifest's pod. So a change of one needs the same change of the other.
func TestInjectedEqualsManifest(t *testing.T) { // I1
	t.Parallel()
	for variant, rootCert := range map[string]string{"istiod": "istio-ca-root-cert", "discovery": "nametap-ca-root-cert"} {
		want := examplePod(t, variant)
		app := want.DeepCopy()
		app.APIVersion, app.Kind = "v1", "Pod"
		app.Spec.InitContainers, app.Spec.Volumes = nil, nil
		text, err := yaml.Marshal(app)
		if err != nil {
			t.Fatal(err)
		}
		cfg := inject.DefaultConfig()
		cfg.RootCert, cfg.ControlPlane = rootCert, "other:15012"
		injected, _, err := inject.Manifest(text, "default", cfg)
		if err != nil {
			t.Fatal(err)
		}
		var got corev1.Pod
		if err := yaml.UnmarshalStrict(injected, &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(alike(want.Spec), alike(got.Spec)); diff != "" {
			t.Errorf("%s (-manifest +injected):\n%s", variant, diff)
		}
	}
}

// alike returns a specification without two differences that have a reason. The manifest sets the
// profile of seccomp for the whole pod; injection changes only its own containers. Names of injected
// volumes begin with nametap-, because the application may have others.
func alike(spec corev1.PodSpec) corev1.PodSpec {
	spec = *spec.DeepCopy()
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if c.SecurityContext.SeccompProfile == nil {
			c.SecurityContext.SeccompProfile = spec.SecurityContext.SeccompProfile
		}
		for j := range c.VolumeMounts {
			c.VolumeMounts[j].Name = strings.TrimPrefix(c.VolumeMounts[j].Name, "nametap-")
		}
	}
	for i := range spec.Volumes {
		spec.Volumes[i].Name = strings.TrimPrefix(spec.Volumes[i].Name, "nametap-")
	}
	slices.SortFunc(spec.Volumes, func(a, b corev1.Volume) int { return strings.Compare(a.Name, b.Name) })
	return spec
}

// TestChartSchema checks that the schema of the chart has exactly the keys of the values. test/machines/chart has the
// tests that need the commands of Helm.
func TestChartSchema(t *testing.T) { // P9
	t.Parallel()
	var values, schema map[string]any
	if err := yaml.Unmarshal([]byte(read(t, "chart/values.yaml")), &values); err != nil {
		t.Fatal(err)
	}
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
	if diff := cmp.Diff(slices.Sorted(maps.Keys(properties)), slices.Sorted(maps.Keys(values))); diff != "" {
		t.Errorf("keys of %s (-schema +values):\n%s", path, diff)
	}
	for key, value := range values {
		child, isMap := value.(map[string]any)
		described, isObject := properties[key].(map[string]any)
		if isMap && isObject {
			sameKeys(t, path+"/"+key, child, described)
		}
	}
}
