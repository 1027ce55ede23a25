package inject

import (
	"fmt"

	"go.yaml.in/yaml/v3"
)

// A Result is the result of injecting a pod.
type Result struct {
	// Pod is the injected pod, or the given pod if the outcome is not Injected.
	Pod     *yaml.Node
	Outcome Outcome
	// Reasons give the reason of the outcome first. Further reasons are about changes of other parts of the pod.
	Reasons []string
}

// Pod adds nametap to a copy of a pod, or says why nametap is not added. node is the pod as a YAML or JSON tree,
// because a tree keeps comments and fields that nametap does not know. Pod does not change node. It returns an error if
// node is no valid pod, or cfg is wrong.
func Pod(node *yaml.Node, ns Namespace, cfg Config) (Result, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return Result{}, err
	}
	p, err := decode(node)
	if err != nil {
		return Result{}, err
	}
	outcome, reason := decide(p, ns, cfg)
	if outcome != Injected {
		return Result{node, outcome, []string{reason}}, nil
	}
	changes, refusal := newEdits(p, ns, cfg)
	if refusal != nil {
		return Result{node, Refused, []string{refusal.Error()}}, nil //nolint:nilerr // a result, for the user
	}
	changed := clone(node)
	changes.apply(changed)
	reasons := []string{reason}
	if changes.istioEnv != nil {
		reasons = append(reasons, fmt.Sprintf("Istio's sidecar is in the pod, so its own DNS capture is off (%s)", dnsCapture))
	}
	return Result{changed, Injected, reasons}, nil
}
