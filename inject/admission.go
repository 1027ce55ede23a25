package inject

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
)

// maxMarks bounds the brackets and commas of a pod in JSON, and with them its values. A value needs 500 bytes of memory while the
// pod is injected (BenchmarkAdmit), and a pod of 3 MiB, which the API server accepts, can have a million.
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
