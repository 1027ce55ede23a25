package inject

import (
	"errors"
	"fmt"
	"reflect"

	"go.yaml.in/yaml/v3"
)

// Limits of a pod in JSON. A value needs 500 bytes of memory while the pod is injected (BenchmarkAdmit). A pod of 3
// MiB, which the API server accepts, can have a million values.
const (
	maxValues = 20_000
	maxDepth  = 100
)

// Admit calls Pod for a pod in JSON, as the API server sends it to a webhook. It also returns the changes as a JSON
// patch (RFC 6902). The patch is nil if there are no changes.
func Admit(object []byte, ns Namespace, cfg Config) (result Result, patch []byte, err error) {
	root, err := parseJSON(object, maxValues, maxDepth)
	if err == nil && root.Kind != yaml.MappingNode {
		err = errors.New("want an object in JSON")
	}
	var v any
	if err == nil {
		v, err = valueOf(root)
	}
	if err != nil {
		return Result{}, nil, fmt.Errorf("not a valid pod: %w", err)
	}
	before, _ := v.(map[string]any)
	result, err = Pod(before, ns, cfg)
	if err != nil || result.Outcome != Injected {
		return result, nil, err
	}
	return result, patchOf(before, result.Pod), nil
}

// An operation is a part of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// patchOf returns the changes of a pod as a JSON patch, nil if there are none. If metadata or spec has changed, the patch
// has it as a whole.
func patchOf(original, injected map[string]any) []byte {
	var patch []operation
	for _, section := range []string{"metadata", "spec"} {
		if next := injected[section]; !reflect.DeepEqual(original[section], next) {
			patch = append(patch, operation{"add", "/" + section, next})
		}
	}
	if patch == nil {
		return nil
	}
	return writeJSON(patch)
}
