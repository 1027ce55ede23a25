package inject_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/inject"
)

// amounts returns resources as texts.
func amounts(list corev1.ResourceList) map[string]string {
	texts := map[string]string{}
	for name, quantity := range list {
		texts[string(name)] = quantity.String()
	}
	return texts
}

// TestResources checks that annotations of a pod precede settings, and settings defaults; that Go's runtime and the
// volume of the state follow from the limit; and what is refused.
func TestResources(t *testing.T) { // I15
	t.Parallel()
	settings := inject.Config{Resources: inject.Resources{Requests: inject.Amounts{"cpu": "5m"}, Limits: inject.Amounts{"cpu": "1", "memory": "96Mi"}}}
	for name, test := range map[string]struct {
		annotations      string
		cfg              inject.Config
		requests, limits map[string]string
		runtime, state   string
	}{
		"defaults": {"", inject.Config{}, map[string]string{"cpu": "10m", "memory": "32Mi"}, map[string]string{"memory": "192Mi"}, "144MiB", "38Mi"},
		"settings": {"", settings, map[string]string{"cpu": "5m", "memory": "32Mi"}, map[string]string{"cpu": "1", "memory": "96Mi"}, "72MiB", "19Mi"},
		"annotations": {
			"nametap.dev/cpu-request: 20m, nametap.dev/memory-request: 48Mi, nametap.dev/cpu-limit: 200m, nametap.dev/memory-limit: 384Mi", settings,
			map[string]string{"cpu": "20m", "memory": "48Mi"}, map[string]string{"cpu": "200m", "memory": "384Mi"}, "288MiB", "76Mi",
		},
		"none": {"nametap.dev/memory-limit: '', nametap.dev/cpu-request: ''", inject.Config{}, map[string]string{"memory": "32Mi"}, map[string]string{}, "", "32Mi"},
	} {
		pod := injected(t, "metadata: {name: app, annotations: {"+test.annotations+"}}\nspec: {containers: [{name: app, image: app}]}\n", test.cfg)
		for _, c := range pod.Spec.InitContainers {
			if diff := cmp.Diff([]map[string]string{test.requests, test.limits}, []map[string]string{amounts(c.Resources.Requests), amounts(c.Resources.Limits)}); diff != "" {
				t.Errorf("%s: %s: %s", name, c.Name, diff)
			}
			if got := variables(c)["GOMEMLIMIT"]; got != test.runtime {
				t.Errorf("%s: %s: GOMEMLIMIT is %q, want %q", name, c.Name, got, test.runtime)
			}
		}
		volumes := map[string]corev1.Volume{}
		for _, v := range pod.Spec.Volumes {
			volumes[v.Name] = v
		}
		if state := volumes["nametap-state"].EmptyDir; state.Medium != corev1.StorageMediumMemory || state.SizeLimit.String() != test.state {
			t.Errorf("%s: the volume of the state is %v", name, state)
		}
		if root := volumes["nametap-root-cert"].ConfigMap; root.Optional == nil || !*root.Optional { // I0
			t.Errorf("%s: the root certificate is %v", name, root)
		}
	}
	for annotations, want := range map[string]string{
		"cpu-limit: much":                          `resources: limits: cpu: "much": want a quantity`,
		"memory-limit: 16Mi":                       "resources: memory: the request 32Mi is above the limit 16Mi",
		"memory-limit: '0'":                        `"0": want a quantity`,
		"memory-request: 1Gi":                      "the request 1Gi is above the limit 192Mi",
		"cpu-request: '2', a/b: c, cpu-limit: 10m": "",
	} {
		text := "metadata: {name: app, annotations: {nametap.dev/" + strings.ReplaceAll(annotations, ", cpu", ", nametap.dev/cpu") + "}}\nspec: {containers: [{name: app, image: app}]}\n"
		refused(t, text, inject.Config{}, "the pod's annotations nametap.dev/cpu-request to nametap.dev/memory-limit")
		refused(t, text, inject.Config{}, want)
	}
}

// TestAmountsStay checks that resources of a Config are not changed by the annotations of a pod.
func TestAmountsStay(t *testing.T) { // I15
	t.Parallel()
	cfg := inject.DefaultConfig()
	limits := maps.Clone(cfg.Resources.Limits)
	injected(t, "metadata: {name: app, annotations: {nametap.dev/memory-limit: 1Gi}}\nspec: {containers: [{name: app, image: app}]}\n", cfg)
	if diff := cmp.Diff(limits, cfg.Resources.Limits); diff != "" {
		t.Error(diff)
	}
}
