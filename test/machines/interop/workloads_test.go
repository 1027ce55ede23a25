package interop

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// workloadTemplate is the template of the pods of all workloads.
const workloadTemplate = `
      metadata: {labels: {app: NAME}}
      spec:
        automountServiceAccountToken: false
        restartPolicy: POLICY
        initContainers: [{name: prepare, image: prepare}]
        containers: [{name: app, image: app}]
`

// workload returns a manifest of a workload.
func workload(kind, name string) string {
	version := "batch/v1"
	if kind == "Deployment" {
		version = "apps/v1"
	}
	template := strings.ReplaceAll(workloadTemplate, "NAME", name)
	head := "apiVersion: " + version + "\nkind: " + kind + "\nmetadata: {name: " + name + "}\nspec:\n"
	switch kind {
	case "Deployment":
		return head + "  selector: {matchLabels: {app: " + name + "}}\n  template:" + strings.Replace(template, "POLICY", "Always", 1)
	case "Job":
		return head + "  template:" + strings.Replace(template, "POLICY", "Never", 1)
	}
	return head + "  schedule: 0 0 1 1 *\n  jobTemplate:\n   spec:\n    template:" + strings.Replace(template, "POLICY", "Never", 1)
}

// TestInjectedWorkloads compares the pods that Kubernetes' controllers make of workloads that are
// injected offline, in a namespace without a label, with pods that the webhook injects.
func TestInjectedWorkloads(t *testing.T) { // I1
	c := newInjectedCluster(t)
	c.injectConfig()
	kinds := []string{"Deployment", "Job", "CronJob"}
	want := map[string]verdict{}
	for _, kind := range kinds {
		name := "offline-" + strings.ToLower(kind)
		injected, err := c.inject("disabled", workload(kind, name))
		if err != nil {
			t.Fatal(err)
		}
		want[kind] = c.podOf("disabled", kind, name, injected)
	}
	c.startWebhook("160")
	for _, kind := range kinds {
		name := "webhook-" + strings.ToLower(kind)
		got := c.podOf("enabled", kind, name, workload(kind, name))
		if diff := cmp.Diff(want[kind], got); diff != "" {
			t.Errorf("%s (-offline +webhook):\n%s", kind, diff)
		}
		if got.Annotations[injectStatus] == "" {
			t.Errorf("%s is not injected", kind)
		}
	}
}

// podOf creates a workload, and returns what has become of its pod.
func (c *injectedCluster) podOf(namespace, kind, name, text string) verdict {
	c.tb.Helper()
	c.mustKubectl("--namespace", namespace, "create", "-f", c.write("workload.yaml", text))
	if kind == "CronJob" {
		c.mustKubectl("--namespace", namespace, "create", "job", "--from=cronjob/"+name, name)
	}
	var pod corev1.Pod
	wait.Until(c.tb, kind+" "+name+" has a pod", func() bool {
		var found corev1.PodList
		c.get("/api/v1/namespaces/"+namespace+"/pods", &found)
		i := slices.IndexFunc(found.Items, func(p corev1.Pod) bool { return strings.HasPrefix(p.Name, name+"-") })
		if i >= 0 {
			pod = found.Items[i]
		}
		return i >= 0
	})
	return verdictOf(c.tb, &pod, nil)
}
