package inject

import (
	"errors"
	"fmt"

	"go.yaml.in/yaml/v3"
)

// Limits of a pod in JSON. A value needs 600 bytes of memory while the pod is injected (BenchmarkAdmit), and
// the 3 MiB that the API server accepts can have a million of them.
const (
	maxValues = 20_000
	maxDepth  = 100
)

// Admit is Pod for a pod in JSON, as the API server sends it to a webhook. It returns also the changes,
// as a JSON patch (RFC 6902) that is nil if there are none. Parts that do not change are not in it.
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

// A patchWriter writes a JSON patch.
type patchWriter struct{ jsonWriter }

// operation adds an operation to the patch. value is nil if it has none.
func (w *patchWriter) operation(op, path string, value *yaml.Node) {
	separator := byte(',')
	if w.Len() == 0 {
		separator = '['
	}
	w.WriteByte(separator)
	w.WriteString(`{"op":"` + op + `","path":`)
	w.text(path)
	if value != nil {
		w.WriteString(`,"value":`)
		w.node(value, "")
	}
	w.WriteByte('}')
}

// patchOf returns the changes of a pod as a JSON patch: of each field of metadata and spec as a whole.
// Libraries that find smaller patches read numbers as floats, and may write others than those of the pod.
func patchOf(before, after *yaml.Node) []byte {
	var patch patchWriter
	for _, section := range []string{"metadata", "spec"} {
		old, next := value(before, section), value(after, section)
		if old == nil {
			patch.operation("add", "/"+section, next)
			continue
		}
		for i := 0; i < len(old.Content); i += 2 {
			if key := old.Content[i].Value; find(next, key) < 0 {
				patch.operation("remove", "/"+section+"/"+key, nil)
			}
		}
		for i := 0; i < len(next.Content); i += 2 {
			key, v := next.Content[i].Value, next.Content[i+1]
			if at := find(old, key); at < 0 || !same(old.Content[at+1], v, false) {
				patch.operation("add", "/"+section+"/"+key, v)
			}
		}
	}
	if patch.Len() == 0 {
		return nil
	}
	patch.WriteByte(']')
	return patch.Bytes()
}
