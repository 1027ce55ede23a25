package inject

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"

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

// maxMarks bounds the brackets and commas of a pod in JSON, and with them its values. A value needs 500 bytes of memory while the
// pod is injected, and a pod of 3 MiB, which the API server accepts, can have a million.
const maxMarks = 50_000

// Admit calls Pod for a pod in JSON, as the API server sends it to a webhook. It also returns the changes as a JSON
// patch (RFC 6902). The patch is nil if there are no changes.
func Admit(object []byte, ns Namespace, cfg Config) (result Result, patch []byte, err error) {
	if n := bytes.Count(object, []byte{'{'}) + bytes.Count(object, []byte{'['}) + bytes.Count(object, []byte{','}); n > maxMarks {
		return Result{}, nil, fmt.Errorf("not a valid pod: %d brackets and commas: want at most %d", n, maxMarks)
	}
	v, err := readJSON(object)
	before, isObject := v.(map[string]any)
	if err == nil && !isObject {
		err = errors.New("want an object in JSON")
	}
	if err != nil {
		return Result{}, nil, fmt.Errorf("not a valid pod: %w", err)
	}
	result, err = Pod(before, ns, cfg)
	if err != nil || reflect.DeepEqual(before, result.Pod) {
		return result, nil, err
	}
	return result, writeJSON([]operation{{"add", "/metadata", result.Pod["metadata"]}, {"add", "/spec", result.Pod["spec"]}}), nil
}

// An operation is a part of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}
