package inject

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// units returns the paths of the units of an added container: the fields that a later injection keeps or replaces as a
// whole. If a later injection generates the same unit as the previous injection, the unit stays as it is in the pod. So
// it keeps changes by other programs, such as LimitRanges, AlwaysPullImages or webhooks that rewrite images. Otherwise
// the unit is replaced; if it is a list or a map, the elements that other programs have added stay. Injection never
// changes the other fields of an added container.
func units() []string {
	return []string{
		"image", "imagePullPolicy", "args", "restartPolicy", "env", "securityContext", "ports", "lifecycle", "readinessProbe", "livenessProbe",
		"resources/requests/cpu", "resources/requests/memory", "resources/limits/cpu", "resources/limits/memory", "volumeMounts",
	}
}

// markSize is the number of characters of a mark, a hash of 24 bits. That suffices, because each mark is compared with
// only one other mark.
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
	all := marks(generated)
	for i, path := range units() {
		start, end := i*markSize, (i+1)*markSize
		if len(previous) == len(all) && previous[start:end] == all[start:end] {
			continue
		}
		next, old := part(generated, path), part(container, path)
		switch path {
		case "env":
			next = withOthers(next, old, "name", func(name string) bool {
				return strings.HasPrefix(name, "NAMETAP_") || slices.Contains([]string{goMemory, dnsCapture, dnsAutoAllocate}, name)
			})
		case "volumeMounts":
			next = withOthers(next, old, "mountPath", func(string) bool { return false })
		case "securityContext":
			next = withOtherKeys(next, old)
		}
		setPath(container, strings.Split(path, "/"), next)
	}
}

// withOthers returns a list with the elements of next, and the elements that other programs have added to old: the
// elements of old whose keys are not in next. It leaves out keys for which isOwn returns true: an earlier injection,
// with other settings, has added them.
func withOthers(next, old *yaml.Node, key string, isOwn func(string) bool) *yaml.Node {
	if old == nil || old.Kind != yaml.SequenceNode {
		return next
	}
	var keys []string
	list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for _, element := range elements(next) {
		keys = append(keys, text(element, key))
		list.Content = append(list.Content, element)
	}
	for _, element := range elements(old) {
		if k := text(element, key); !slices.Contains(keys, k) && !isOwn(k) {
			list.Content = append(list.Content, element)
		}
	}
	if len(list.Content) == 0 {
		return nil
	}
	return list
}

// withOtherKeys adds to the map next all keys of the map old that next lacks, and returns next.
func withOtherKeys(next, old *yaml.Node) *yaml.Node {
	if old == nil || old.Kind != yaml.MappingNode {
		return next
	}
	inlineMerges(old)
	for i := 0; i+1 < len(old.Content); i += 2 {
		if key := old.Content[i].Value; find(next, key) < 0 {
			set(next, key, "", old.Content[i+1])
		}
	}
	return next
}

// excludeInbound is Istio's annotation with the ports whose connections from outside do not go through Envoy. Istio's CNI
// plugin and its injector read it.
const excludeInbound = "traffic.sidecar.istio.io/excludeInboundPorts"

// excludeStatus adds the agent's status port to the annotation, and to the arguments of istio-init, if Istio's injector has
// written them already. The annotation replaces the ports that Istio excludes in the whole mesh, so it has those of istio-init,
// too.
func excludeStatus(annotations, spec *yaml.Node) {
	ports := text(annotations, excludeInbound)
	for _, c := range istioElements(spec) {
		args := elements(value(c, "args"))
		for i := 1; i < len(args) && nameOf(c) == istioInit; i++ {
			if flag := args[i-1].Value; flag == "-d" || flag == "--istio-local-exclude-ports" {
				ports = cmp.Or(ports, args[i].Value)
				args[i].Value, args[i].Tag = withStatusPort(args[i].Value), "!!str"
			}
		}
	}
	update(annotations, excludeInbound, withStatusPort(ports))
}

// withStatusPort returns a list of ports, separated by commas, that has the status port beside Istio.
func withStatusPort(ports string) string {
	port := strconv.Itoa(besideIstio)
	for p := range strings.SplitSeq(ports, ",") {
		if strings.TrimSpace(p) == port {
			return ports
		}
	}
	if ports = strings.TrimRight(ports, ", "); ports != "" {
		ports += ","
	}
	return ports + port
}
