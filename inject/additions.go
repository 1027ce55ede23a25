package inject

import (
	"crypto/sha256"
	"encoding/base64"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// units returns the paths of the units of an added container: the fields that a later injection keeps or replaces as a
// whole. If a later injection generates the same unit as the one before, the unit stays, even if others have changed
// it: LimitRanges, AlwaysPullImages or webhooks that rewrite images. Otherwise the unit is replaced, except that
// elements that others have added to a list or a map stay. Injection never changes the other fields of an added
// container.
func units() []string {
	return []string{
		"image", "imagePullPolicy", "args", "restartPolicy", "env", "securityContext", "ports", "lifecycle", "readinessProbe", "livenessProbe",
		"resources/requests/cpu", "resources/requests/memory", "resources/limits/cpu", "resources/limits/memory", "volumeMounts",
	}
}

// markSize is the number of characters of a mark, which has 24 bits. That suffices: a mark is compared with one other mark.
const markSize = 4

// mark returns a short hash of a value, which may be nil.
func mark(node *yaml.Node) string {
	var w jsonWriter
	if node != nil {
		w.node(node, "")
	}
	sum := sha256.Sum256(w.Bytes())
	return base64.RawURLEncoding.EncodeToString(sum[:])[:markSize]
}

// marks returns the marks of the units of a container, in the order of the function units.
func marks(container *yaml.Node) string {
	var all strings.Builder
	for _, path := range units() {
		all.WriteString(mark(part(container, path)))
	}
	return all.String()
}

// mergeContainer updates container, which an earlier injection has added, with the units of generated. previous has the
// marks of the container that the earlier injection generated; "" if they are not known.
func mergeContainer(container, generated *yaml.Node, previous string) {
	now := marks(generated)
	for i, path := range units() {
		at := i * markSize
		if len(previous) == len(now) && previous[at:at+markSize] == now[at:at+markSize] {
			continue
		}
		next, current := part(generated, path), part(container, path)
		switch path {
		case "env":
			next = withOthers(next, current, "name", func(name string) bool { return strings.HasPrefix(name, "NAMETAP_") || name == goMemory })
		case "volumeMounts":
			next = withOthers(next, current, "mountPath", func(string) bool { return false })
		case "securityContext":
			next = withOtherKeys(next, current)
		}
		put(container, strings.Split(path, "/"), next)
	}
}

// withOthers returns the list generated, with the elements that others have added to the list current: the elements
// whose keys are not in generated. It leaves out elements for whose keys own returns true: injection adds such keys
// itself, with other settings.
func withOthers(generated, current *yaml.Node, key string, own func(string) bool) *yaml.Node {
	if current == nil || current.Kind != yaml.SequenceNode {
		return generated
	}
	var keys []string
	list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for _, element := range elements(generated) {
		keys = append(keys, text(element, key))
		list.Content = append(list.Content, element)
	}
	for _, element := range elements(current) {
		if k := text(element, key); !slices.Contains(keys, k) && !own(k) {
			list.Content = append(list.Content, element)
		}
	}
	if len(list.Content) == 0 {
		return nil
	}
	return list
}

// withOtherKeys adds to the map generated the keys that only the map current has, and returns generated.
func withOtherKeys(generated, current *yaml.Node) *yaml.Node {
	if current == nil || current.Kind != yaml.MappingNode {
		return generated
	}
	own(current)
	for i := 0; i+1 < len(current.Content); i += 2 {
		if key := current.Content[i].Value; find(generated, key) < 0 {
			set(generated, key, "", current.Content[i+1])
		}
	}
	return generated
}
