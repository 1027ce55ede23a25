package inject

import (
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"
)

// Limits of a pod in JSON. A value needs 600 bytes of memory while the pod is injected (BenchmarkAdmit). A pod of 3
// MiB, which the API server accepts, can have a million values.
const (
	maxValues = 20_000
	maxDepth  = 100
)

// Admit calls Pod for a pod in JSON, as the API server sends it to a webhook. It also returns the changes as a JSON
// patch (RFC 6902). The patch is nil if there are no changes.
func Admit(object []byte, ns Namespace, cfg Config) (result Result, patch []byte, err error) {
	before, err := readJSON(object, maxValues, maxDepth)
	if err == nil && before.Kind != yaml.MappingNode {
		err = errors.New("want an object in JSON")
	}
	if err != nil {
		return Result{}, nil, fmt.Errorf("not a valid pod: %w", err)
	}
	result, err = Pod(before, ns, cfg)
	if err != nil || result.Outcome != Injected {
		return result, nil, err
	}
	return result, patchOf(before, result.Pod), nil
}

// patchOf returns the changes of a pod as a JSON patch. If metadata or spec has changed, the patch has it as a whole.
// A library could find a smaller patch, but such libraries read numbers as floats, and may change them.
func patchOf(original, injected *yaml.Node) []byte {
	var patch jsonWriter
	for _, section := range []string{"metadata", "spec"} {
		next := value(injected, section)
		if old := value(original, section); old != nil && sameTree(old, next, false) {
			continue
		}
		separator := byte('[')
		if patch.Len() > 0 {
			separator = ','
		}
		patch.WriteByte(separator)
		patch.WriteString(`{"op":"add","path":"/` + section + `","value":`)
		patch.node(next, "")
		patch.WriteByte('}')
	}
	if patch.Len() > 0 {
		patch.WriteByte(']')
	}
	return patch.Bytes()
}
