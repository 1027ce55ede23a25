package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/nds"
)

// Prefixes of variables that become node metadata, as with Istio's agent.
const (
	metaPrefix     = "ISTIO_META_"
	metaJSONPrefix = "ISTIO_METAJSON_"
	labelsKey      = "LABELS"
)

// canonicalLabel returns the label that a variable of istioctl's files stands for, or "" if key is no such variable.
func canonicalLabel(key string) string {
	switch key {
	case "CANONICAL_SERVICE":
		return "service.istio.io/canonical-name"
	case "CANONICAL_REVISION":
		return "service.istio.io/canonical-revision"
	}
	return ""
}

// A workloadIdentity is what the environment and Istio's configuration say about the workload.
type workloadIdentity struct {
	metadata map[string]any
	labels   map[string]string
}

// readIdentity reads the identity. It leaves out variables that are settings.
func readIdentity(flags *pflag.FlagSet, environ []string) (workloadIdentity, error) {
	id := workloadIdentity{metadata: map[string]any{}, labels: map[string]string{}}
	values, err := settings.Metadata(flags, environ, metaPrefix, metaJSONPrefix, "CANONICAL_")
	if err != nil {
		return id, err
	}
	flags.VisitAll(func(flag *pflag.Flag) { delete(values, settings.Env(flag)) })
	for _, key := range slices.Sorted(maps.Keys(values)) {
		value := values[key]
		switch label, name := canonicalLabel(key), strings.TrimPrefix(key, metaPrefix); {
		case label != "":
			id.labels[label] = value
		case name == labelsKey || key == metaJSONPrefix+labelsKey:
			err = id.addLabels(value)
		case strings.HasPrefix(key, metaJSONPrefix):
			err = id.addJSON(value)
		case strings.HasPrefix(key, metaPrefix):
			id.metadata[name] = value
		}
		if err != nil {
			return id, fmt.Errorf("%s=%q: %w", key, value, err)
		}
	}
	return id, nil
}

// addLabels adds labels in the form of a JSON object. They replace labels of the same name that canonicalLabel has
// returned. Variables are read in the order of their names, so the variables of canonicalLabel come first.
func (id *workloadIdentity) addLabels(text string) error {
	var labels map[string]string
	if err := json.Unmarshal([]byte(text), &labels); err != nil {
		return errors.New(`want labels as a JSON object, such as {"app":"web"}`)
	}
	maps.Copy(id.labels, labels)
	return nil
}

// addJSON adds the fields of a JSON object to the metadata, as Istio's agent does.
func (id *workloadIdentity) addJSON(text string) error {
	var fields map[string]any
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		return errors.New("want a JSON object")
	}
	for key, value := range fields {
		if b, ok := value.(bool); ok {
			value = strconv.FormatBool(b) // istiod refuses booleans of JSON
		}
		id.metadata[key] = value
	}
	return nil
}

// refresh returns a function that gives a node its current addresses and labels. The labels are the fixed labels and
// the labels in the file that the downward API writes.
func (o *options) refresh(fixed map[string]string) func(nds.Node) (nds.Node, error) {
	return func(node nds.Node) (nds.Node, error) {
		var err error
		if node.IPs, err = agent.InstanceIPs(o.instanceIP); err != nil {
			return node, err
		}
		pod, err := podLabels(o.labelsFile)
		if err != nil {
			return node, fmt.Errorf("labels-file %q: %w", o.labelsFile, err)
		}
		node.Labels = maps.Clone(fixed)
		maps.Copy(node.Labels, pod)
		return node, nil
	}
}

// podLabels reads a file with lines of the form key="value". An absent file has no labels.
func podLabels(path string) (map[string]string, error) {
	labels := map[string]string{}
	if path == "" {
		return labels, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return labels, nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(text)) {
		key, quoted, found := strings.Cut(strings.TrimSpace(line), "=")
		if !found && key == "" {
			continue
		}
		value, err := strconv.Unquote(quoted)
		if err != nil {
			return nil, fmt.Errorf(`line %q: want key="value"`, strings.TrimSpace(line))
		}
		if key != "pod-template-hash" { // the ReplicaSet's label; Sidecar resources do not select by it
			labels[key] = value
		}
	}
	return labels, nil
}
