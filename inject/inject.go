package inject

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
)

// A Result is the result of injecting a pod.
type Result struct {
	// Pod is the injected pod, or the given pod if the outcome is not Injected.
	Pod     map[string]any
	Outcome Outcome
	// Reasons give the reason of the outcome first. Further reasons are about changes of other parts of the pod.
	Reasons []string
}

// Pod adds nametap to a copy of a pod, or says why nametap is not added. original is the pod as [Admit] reads it from
// JSON: it keeps fields that nametap does not know. Pod returns an error if original is no valid pod, or cfg is wrong.
func Pod(original map[string]any, ns Namespace, cfg Config) (Result, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return Result{}, err
	}
	p, err := decode(original)
	if err != nil {
		return Result{}, err
	}
	outcome, reason := decide(p, ns, cfg)
	if outcome != Injected {
		return Result{original, outcome, []string{reason}}, nil
	}
	changes, refusal := newEdits(p, ns, cfg)
	if refusal != nil {
		return Result{original, Refused, []string{refusal.Error()}}, nil //nolint:nilerr // a result, for the user
	}
	changed := runtime.DeepCopyJSON(original)
	changes.apply(changed)
	reasons := []string{reason}
	if changes.istioEnv != nil {
		reasons = append(reasons, fmt.Sprintf("Istio's sidecar is in the pod, so its own DNS capture is off (%s)", dnsCapture))
	}
	return Result{changed, Injected, reasons}, nil
}
