package chart

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	draws = flag.Int("chart.draws", 150, "random values that TestRandomValues draws for each version of Helm")
	seed  = flag.Uint64("chart.seed", 1, "seed of TestRandomValues")
)

// TestRandomValues draws values from the schema, some of them wrong: the chart renders valid objects that fit each
// other, or refuses the values with a sentence.
func TestRandomValues(t *testing.T) { // P9
	text, err := os.ReadFile(filepath.Join(chart, "values.schema.json"))
	if err != nil {
		t.Fatal(err)
	}
	var schema map[string]any
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	versions(t, func(h helm) {
		t := h.t
		g := &generator{Rand: rand.New(rand.NewPCG(*seed, 0)), definitions: schema["definitions"].(map[string]any)}
		var rendered int
		for i := range *draws {
			// Half of the draws are right by the schema, so that the templates see them.
			g.wrong = []float64{0, 0.04}[i%2]
			values, err := json.Marshal(g.object(schema))
			if err != nil {
				t.Fatal(err)
			}
			all, err := h.template(string(values))
			if err != nil {
				if why := notSentence(err.Error()); why != "" {
					t.Errorf("draw %d: %s: %v\n%s", i, why, err, values)
				}
				continue
			}
			rendered++
			if problems := check(all); len(problems) > 0 {
				t.Errorf("draw %d:\n%s\n%s", i, strings.Join(problems, "\n"), values)
			}
		}
		t.Logf("%d of %d draws rendered", rendered, *draws)
		if rendered < *draws/20 {
			t.Errorf("only %d of %d draws rendered", rendered, *draws)
		}
	})
}

// sentence matches the errors of the schema, and errors of `fail` in a template.
var sentence = regexp.MustCompile(`^values don't meet the specifications of the schema|^execution error at \(nametap/templates/[a-z]+\.yaml:[0-9]+:[0-9]+\): [a-zA-Z-]+(\.[a-zA-Z-]+)* `)

// notSentence says why an error is not a sentence for users; empty if it is one.
func notSentence(text string) string {
	_, text, _ = strings.Cut(text, "\nError: ") // warnings of Helm itself stand before
	for _, trace := range []string{"nil pointer", "executing ", "error calling", "<nil>", "%!", "map[", "wrong type", "YAML parse error"} {
		if strings.Contains(text, trace) {
			return "has " + trace
		}
	}
	if !sentence.MatchString(text) {
		return "unknown form"
	}
	return ""
}

// A generator draws values from a schema.
type generator struct {
	*rand.Rand
	definitions map[string]any
	wrong       float64 // the share of values that are of another kind
}

// pick returns one of the values.
func pick[T any](g *generator, values ...T) T { return values[g.IntN(len(values))] }

// value draws a value.
func (g *generator) value(name string, node map[string]any) any {
	if g.Float64() < g.wrong {
		return pick[any](g, nil, "", " ", -1, 1.5, true, []any{}, []any{nil}, map[string]any{}, map[string]any{"": nil}, "a\nb", "{{ .Values }}", "yes", "0x1")
	}
	node = g.resolve(node)
	if sample, ok := samples[name]; ok {
		return pick(g, sample...)
	}
	if enum, ok := node["enum"].([]any); ok {
		return pick(g, enum...)
	}
	if value, ok := node["const"]; ok {
		return value
	}
	switch node["type"] {
	case "object":
		return g.object(node)
	case "array":
		items, _ := node["items"].(map[string]any)
		list := []any{}
		for range g.IntN(3) {
			list = append(list, g.value(name+"[]", items))
		}
		return list
	case "boolean":
		return g.IntN(2) == 0
	case "integer":
		return 1 + g.IntN(5)
	case "string":
		return pick(g, "", "a", "b.example", "/c", "1", "true", "null", "10s")
	}
	return pick[any](g, 1, "a", true)
}

// resolve follows references, and chooses one of alternatives.
func (g *generator) resolve(node map[string]any) map[string]any {
	if ref, ok := node["$ref"].(string); ok {
		return g.resolve(g.definitions[strings.TrimPrefix(ref, "#/definitions/")].(map[string]any))
	}
	if choices, ok := node["anyOf"].([]any); ok {
		return g.resolve(pick(g, choices...).(map[string]any))
	}
	all, ok := node["allOf"].([]any)
	if !ok {
		return node
	}
	merged := maps.Clone(node)
	merged["type"] = "object"
	for _, part := range all {
		resolved := g.resolve(part.(map[string]any))
		for key, value := range resolved {
			if _, ok := merged[key]; !ok || key == "properties" {
				merged[key] = value
			}
		}
	}
	return merged
}

// object draws an object: some of its properties, or some of the names that it allows.
func (g *generator) object(node map[string]any) map[string]any {
	object := map[string]any{}
	properties, _ := node["properties"].(map[string]any)
	required, _ := node["required"].([]any)
	for _, key := range slices.Sorted(maps.Keys(properties)) {
		property := properties[key].(map[string]any)
		_, isRef := property["$ref"]
		section := property["type"] == "object" && property["properties"] != nil && !isRef
		if section || slices.Contains(required, any(key)) || g.IntN(5) == 0 {
			object[key] = g.value(key, property)
		}
	}
	if properties != nil && node["propertyNames"] == nil {
		return object
	}
	allowed, _ := node["propertyNames"].(map[string]any)
	names, _ := allowed["enum"].([]any)
	clear(object)
	for range g.IntN(3) {
		name := pick(g, "a", "b.example/c", "team")
		if len(names) > 0 {
			name = pick(g, names...).(string)
		}
		property, ok := properties[name].(map[string]any)
		if !ok {
			property, ok = node["additionalProperties"].(map[string]any)
		}
		if !ok {
			property = map[string]any{}
		}
		object[name] = g.value(name, property)
	}
	return object
}

// samples are values of names whose patterns the generator does not read. Most are right.
var samples = map[string][]any{
	"registry":            {"", "registry.example.com", "[fd00::1]:5000/mesh"},
	"tag":                 {"", "1.2", "0.1.0-rc.1", "1@sha256:" + strings.Repeat("0", 64)},
	"digest":              {"", digest},
	"name":                {"", "own", "two", "a"},
	"controlPlane":        {"", "istiod.istio-system.svc:15012", "nametap-discovery.nametap-system.svc:15012", "mesh.example.com:443"},
	"rootCert":            {"", "own-root"},
	"caBundle":            {"", "-----BEGIN CERTIFICATE-----\nMII=\n-----END CERTIFICATE-----\n"},
	"clusterDomain":       {"cluster.local", "corp.example."},
	"clusters[]":          {"192.0.2.0/24"},
	"clients[]":           {"192.0.2.0/24", "2001:db8::/32"},
	"nameservers[]":       {"10.96.0.10", "fd00::a"},
	"ignoredNamespaces[]": {"kube-system", "1e3"},
	"pullSecrets[]":       {"one", "two"},
	"interval":            {"", "30s"},
	"priorityClassName":   {"", "system-cluster-critical"},
	"secret":              {"", "own-tls", "nametap-discovery-tls"},
	"extraVolumes[]":      {map[string]any{"name": "a", "emptyDir": map[string]any{}}, map[string]any{"name": "b", "secret": map[string]any{"secretName": "b"}}},
	"extraVolumeMounts[]": {map[string]any{"name": "a", "mountPath": "/a"}, map[string]any{"name": "b", "mountPath": "/b", "readOnly": true}},
	"nodeAffinity":        {map[string]any{}},
	"podAffinity":         {map[string]any{}},
	"podAntiAffinity":     {map[string]any{}},
	"matchExpressions[]":  {map[string]any{"key": "a", "operator": "Exists"}},
	"requests":            {map[string]any{"cpu": "10m", "memory": 1e9}, map[string]any{"cpu": 0.5}, map[string]any{}},
	"limits":              {map[string]any{"memory": "1Gi"}},
	"topologyKey":         {"kubernetes.io/hostname"},
	"kubeconfig":          {"/a/config", "/c/config"},
	"config-dir":          {"/b", ""},
	"state-dir":           {"/a/state", ""},
	"mountPath":           {"/a"},
	"level":               {"s0:c1"},
	"log-level":           {"debug", "INFO+4"},
	"ttl":                 {"30s"},
}

// problem formats a problem of an object.
func problem(key, format string, args ...any) string {
	return key + ": " + fmt.Sprintf(format, args...)
}
