package inject

import (
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// units returns the paths of the units of an added container. If a later injection generates the same unit as the previous one,
// it stays as it is in the pod, with changes by other programs, such as LimitRanges, AlwaysPullImages or webhooks that rewrite
// images. Otherwise it is replaced; in env, volumeMounts and securityContext, what others have added stays. Injection never
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
func mark(v any) string {
	sum := sha256.Sum256(writeJSON(v))
	return base64.RawURLEncoding.EncodeToString(sum[:])[:markSize]
}

// marks returns the marks of the units of a container, in the order of the function units.
func marks(container map[string]any) string {
	var all strings.Builder
	for _, path := range units() {
		parent, key := unit(container, path, object)
		all.WriteString(mark(parent[key]))
	}
	return all.String()
}

// unit returns the object in a container that has a unit, and the unit's key in it. step returns the object of a key.
func unit(container map[string]any, path string, step func(m map[string]any, key string) map[string]any) (parent map[string]any, key string) {
	keys := strings.Split(path, "/")
	for _, key := range keys[:len(keys)-1] {
		container = step(container, key)
	}
	return container, keys[len(keys)-1]
}

// mergeContainer updates container, which an earlier injection has added, with the units of generated. previous has the
// marks of the container that the earlier injection generated; "" if they are not known.
func mergeContainer(container, generated map[string]any, previous string) {
	all := marks(generated)
	for i, path := range units() {
		start, end := i*markSize, (i+1)*markSize
		if len(previous) == len(all) && previous[start:end] == all[start:end] {
			continue
		}
		from, key := unit(generated, path, object)
		to, _ := unit(container, path, object)
		next := from[key]
		switch path {
		case "env":
			next = withOthers(list(from, key), list(to, key), "name", func(name string) bool {
				return strings.HasPrefix(name, "NAMETAP_") || slices.Contains([]string{goMemory, dnsCapture, dnsAutoAllocate}, name)
			})
		case "volumeMounts":
			next = withOthers(list(from, key), list(to, key), "mountPath", func(path string) bool { return path == guardDir })
		case "securityContext":
			merged := maps.Collect(maps.All(object(to, key)))
			maps.Copy(merged, object(from, key))
			next = merged
		}
		if delete(to, key); next != nil {
			to, _ = unit(container, path, ensure)
			to[key] = next
		}
	}
}

// withOthers returns a list with the elements of next, and the elements that other programs have added to old: the
// elements of old whose keys are not in next. It leaves out keys for which isOwn returns true: an earlier injection,
// with other settings, has added them.
func withOthers(next, old []any, key string, isOwn func(string) bool) any {
	keyOf := func(v any) string {
		m, _ := v.(map[string]any)
		return text(m, key)
	}
	all := slices.Clone(next)
	for _, element := range old {
		k := keyOf(element)
		if !isOwn(k) && !slices.ContainsFunc(next, func(v any) bool { return keyOf(v) == k }) {
			all = append(all, element)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all
}

// excludeInbound is Istio's annotation with the ports whose connections from outside do not go through Envoy. Istio's CNI
// plugin and its injector read it. istioStatus is the annotation of pods that the injector has changed.
const excludeInbound, istioStatus = "traffic.sidecar.istio.io/excludeInboundPorts", "sidecar.istio.io/status"

// excludeStatus adds the agent's status port to the annotation, and to the arguments of istio-init. The annotation replaces the
// ports that Istio excludes in the whole mesh, so it has those of istio-init, too. If it has none, and Istio's injector is still
// to come for a sidecar that the pod's author describes, it stays away: nobody would know the ports of the mesh.
func excludeStatus(annotations, spec map[string]any) {
	ports, written := text(annotations, excludeInbound), text(annotations, istioStatus) != ""
	for _, c := range istioElements(spec) {
		written = written || nameOf(c) == istioInit
		args := list(c, "args")
		for i := 1; i < len(args) && nameOf(c) == istioInit; i++ {
			if flag := args[i-1]; flag == "-d" || flag == "--istio-local-exclude-ports" {
				excluded, _ := args[i].(string)
				ports = cmp.Or(ports, excluded)
				args[i] = withStatusPort(excluded)
			}
		}
	}
	if written || ports != "" {
		annotations[excludeInbound] = withStatusPort(ports)
	}
}

// withStatusPort returns a list of ports, separated by commas, that has the status port beside Istio.
func withStatusPort(ports string) string {
	port := strconv.Itoa(besideIstio)
	if slices.Contains(strings.Split(strings.ReplaceAll(ports, " ", ""), ","), port) {
		return ports
	}
	if ports = strings.TrimRight(ports, ", "); ports != "" {
		ports += ","
	}
	return ports + port
}
