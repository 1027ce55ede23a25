package inject

import (
	"fmt"

	"go.yaml.in/yaml/v3"
)

// A Result is what has become of a pod.
type Result struct {
	// Pod is the pod with nametap in it, or the given pod if the outcome is not Injected.
	Pod     *yaml.Node
	Outcome Outcome
	// Reasons say why. The first one decided; others are changes of other parts of the pod.
	Reasons []string
}

// Pod returns a pod with nametap in it, and why. The pod is a YAML or JSON tree, because that keeps
// comments and fields that nametap does not know. It is not changed. An error means that it is no
// pod, or that the Config is wrong.
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
	if err := changes.apply(changed); err != nil {
		return Result{}, fmt.Errorf("changing the pod: %w", err)
	}
	reasons := []string{reason}
	if changes.istioEnv != nil {
		reasons = append(reasons, fmt.Sprintf("Istio's sidecar is in the pod, so its own DNS capture is off (%s)", dnsCapture))
	}
	return Result{changed, Injected, reasons}, nil
}
