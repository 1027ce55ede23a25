package interop

import (
	"strings"
	"testing"
)

// TestDrain drains a node with `kubectl drain`, which refuses pods with an emptyDir of any kind unless it may delete
// their data. docs/injection.md says so.
func TestDrain(t *testing.T) { // I15
	c := newInjectedCluster(t)
	c.apply("apiVersion: v1\nkind: Node\nmetadata: {name: worker}\n")
	c.startWebhook("160")
	pod := strings.Replace(plainPod, "spec:\n", "spec:\n  nodeName: worker\n", 1)
	drain := func(flags ...string) (string, error) {
		t.Helper()
		return c.kubectl(append([]string{"drain", "worker", "--force", "--dry-run=server"}, flags...)...)
	}
	if _, err := c.createPod("none", pod, ""); err != nil {
		t.Fatal(err)
	}
	if output, err := drain(); err != nil {
		t.Errorf("with a pod without the agent: %v\n%s", err, output)
	}
	injected, err := c.createPod("enabled", pod, "")
	if err != nil || injected.Annotations[injectStatus] == "" {
		t.Fatalf("%v %v", injected, err)
	}
	if output, err := drain(); err == nil || !strings.Contains(output, "local storage") {
		t.Errorf("with the agent: %v\n%s", err, output)
	}
	if output, err := drain("--delete-emptydir-data"); err != nil || !strings.Contains(output, "enabled/app") && !strings.Contains(output, "pod/app") {
		t.Errorf("with the flag: %v\n%s", err, output)
	}
}
