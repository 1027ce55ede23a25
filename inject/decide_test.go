package inject_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nametap/nametap/inject"
)

// decisions is the table of decisions. A dash is a missing label or annotation. "status" is a pod
// that was injected, "hand" one with the containers of nametap that was not.
const decisions = `
namespace    its label  pod's label  annotation  other        outcome   reason
shop         -          -            -           -            skipped   neither the pod nor its namespace has the label
shop         -          true         -           -            injected  the pod has the label nametap.dev/inject: "true"
shop         -          false        -           -            skipped   the pod has the label nametap.dev/inject: "false"
shop         enabled    -            -           -            injected  the namespace has the label
shop         enabled    true         -           -            injected  the pod has the label nametap.dev/inject: "true"
shop         enabled    false        -           -            skipped   the pod has the label nametap.dev/inject: "false"
shop         disabled   -            -           -            skipped   the namespace's label nametap.dev/inject has another value
shop         disabled   true         -           -            injected  the pod has the label nametap.dev/inject: "true"
shop         disabled   false        -           -            skipped   the pod has the label nametap.dev/inject: "false"
shop         true       -            -           -            skipped   the namespace's label nametap.dev/inject has another value

shop         -          yes          -           -            refused   "yes", want "true" or "false"
shop         enabled    enabled      -           -            refused   "enabled", want "true" or "false"
kube-system  enabled    yes          -           -            skipped   the namespace is ignored

shop         enabled    -            status      -            injected  the namespace has the label
shop         -          true         status      -            injected  the pod has the label nametap.dev/inject: "true"
shop         enabled    false        status      -            skipped   the pod has the label nametap.dev/inject: "false"
shop         -          -            status      -            skipped   neither the pod nor its namespace has the label
shop         enabled    -            broken      -            refused   annotation nametap.dev/status: "?"
shop         enabled    -            lines        -            refused   annotation nametap.dev/status: "?
shop         enabled    false        broken      -            skipped   the pod has the label nametap.dev/inject: "false"
shop         enabled    -            mirror      -            skipped   the pod is a copy of one that the node runs from a file
shop         enabled    true         mirror      -            skipped   the pod is a copy of one that the node runs from a file

shop         enabled    -            -           hostNetwork  skipped   hostNetwork
shop         -          true         -           hostNetwork  skipped   hostNetwork
shop         enabled    true         status      hostNetwork  skipped   hostNetwork
shop         enabled    true         -           windows      skipped   for Windows
shop         enabled    true         -           winselector  skipped   for Windows
shop         enabled    true         -           winaffinity  skipped   for Windows
shop         enabled    true         -           betaselector skipped  for Windows
shop         enabled    true         -           betaaffinity skipped  for Windows
shop         enabled    true         -           notaffinity  injected  the pod has the label nametap.dev/inject: "true"
shop         enabled    true         -           anyaffinity  injected  the pod has the label nametap.dev/inject: "true"
shop         enabled    -            -           hand         skipped   and no annotation nametap.dev/status
shop         enabled    true         -           hand         skipped   and no annotation nametap.dev/status

kube-system      enabled  true       -           -            skipped   the namespace is ignored
kube-public      enabled  true       -           -            skipped   the namespace is ignored
kube-node-lease  enabled  true       -           -            skipped   the namespace is ignored
istio-system     enabled  true       -           -            skipped   the namespace is ignored
nametap-system   enabled  true       status      -            skipped   the namespace is ignored
`

// TestDecisions checks every row of the table, and that a pod that is not injected stays as it is.
func TestDecisions(t *testing.T) { // I3
	t.Parallel()
	for line := range strings.Lines(strings.TrimSpace(decisions)) {
		cells := strings.Fields(line)
		if len(cells) < 7 || cells[0] == "namespace" {
			continue
		}
		namespace, nsLabel, podLabel, annotation, other, outcome := cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]
		reason := strings.Join(cells[6:], " ")
		text := "metadata:\n  name: app\n"
		if podLabel != "-" {
			text += fmt.Sprintf("  labels: {nametap.dev/inject: %q}\n", podLabel)
		}
		text += map[string]string{
			"-":      "",
			"status": "  annotations: {nametap.dev/status: '{\"mode\":\"rules\",\"initContainers\":{\"nametap\":\"\"},\"volumes\":{\"nametap-state\":\"\"}}'}\n",
			"broken": "  annotations: {nametap.dev/status: '?'}\n",
			"lines":  "  annotations: {nametap.dev/status: \"?\\n\"}\n",
			"mirror": "  annotations: {kubernetes.io/config.mirror: abc}\n",
		}[annotation]
		text += "spec:\n  containers: [{name: app, image: app}]\n"
		text += map[string]string{
			"-":            "",
			"hostNetwork":  "  hostNetwork: true\n",
			"windows":      "  os: {name: windows}\n",
			"winselector":  "  nodeSelector: {kubernetes.io/os: windows}\n",
			"winaffinity":  "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}, {key: kubernetes.io/os, operator: In, values: [windows]}]}]}}}\n",
			"betaselector": "  nodeSelector: {beta.kubernetes.io/os: windows}\n",
			"betaaffinity": "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: beta.kubernetes.io/os, operator: In, values: [windows]}]}, {matchExpressions: [{key: kubernetes.io/os, operator: In, values: [windows]}]}]}}}\n",
			"notaffinity":  "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/os, operator: NotIn, values: [windows]}]}]}}}\n",
			"anyaffinity":  "  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/os, operator: In, values: [windows]}]}, {matchExpressions: [{key: a, operator: Exists}]}]}}}\n",
			"hand":         "  initContainers: [{name: nametap, image: nametap}]\n",
		}[other]
		if nsLabel == "-" {
			nsLabel = ""
		}
		pod := parse(t, text)
		result, err := inject.Pod(pod, inject.Namespace{Name: namespace, Labels: map[string]string{inject.Label: nsLabel}}, inject.Config{})
		if err != nil {
			t.Errorf("%s%v", line, err)
			continue
		}
		if string(result.Outcome) != outcome || !strings.Contains(result.Reasons[0], reason) {
			t.Errorf("%sgot %s %q", line, result.Outcome, result.Reasons)
		}
		if changed := format(t, result.Pod) != format(t, parse(t, text)); changed != (outcome == "injected") {
			t.Errorf("%sthe pod has changed: %v", line, changed)
		}
		if format(t, pod) != format(t, parse(t, text)) {
			t.Errorf("%sthe pod that was given has changed", line)
		}
	}
}
