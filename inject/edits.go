package inject

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// edits are all changes of one pod. The parts that an earlier injection added are found by their names.
type edits struct {
	previous         status
	initContainers   []map[string]any // go before all others
	volumes          []any            // go after all others
	sysctls          []corev1.Sysctl
	imagePullSecrets []corev1.LocalObjectReference
	ambient          bool           // whether to switch off the DNS capture of ztunnel
	dns              *dnsFields     // nil leaves the fields of the DNS as they are
	istioEnv         *corev1.EnvVar // set in the containers of Istio; nil sets none
	rootCAs          string         // for the annotation; empty removes it
	status           string
}

// dnsCapture is the environment variable that switches on the DNS capture of Istio's agent: its
// listener on port 15053 in istio-proxy, and the rules in istio-init or in Istio's CNI plugin, which
// reads the environment of istio-proxy. dnsAutoAllocate asks the control plane for automatic VIPs.
const dnsCapture, dnsAutoAllocate = "ISTIO_META_DNS_CAPTURE", "ISTIO_META_DNS_AUTO_ALLOCATE"

// newEdits returns the changes of a pod that is to be injected, or an error that says why it is refused.
func newEdits(p *pod, ns Namespace, cfg Config) (edits, error) {
	previous, err := parseStatus(p.Annotations)
	if err != nil {
		return edits{}, err
	}
	if cfg, err = cfg.forPod(p, ns); err != nil {
		return edits{}, err
	}
	if reason := cmp.Or(wayAround(p, previous, cfg), obstacle(p, previous, cfg)); reason != "" {
		return edits{}, errors.New(reason)
	}
	next, e := status{Mode: cfg.Mode, InitContainers: map[string]string{}, Volumes: map[string]string{}}, edits{previous: previous, ambient: p.ambient}
	for _, name := range cfg.ImagePullSecrets {
		if own := slices.Contains(p.Spec.ImagePullSecrets, corev1.LocalObjectReference{Name: name}); !own || slices.Contains(previous.ImagePullSecrets, name) {
			e.imagePullSecrets = append(e.imagePullSecrets, corev1.LocalObjectReference{Name: name})
			next.ImagePullSecrets = append(next.ImagePullSecrets, name)
		}
	}
	own := ownDNS(p, previous)
	if previous.Mode == Resolv {
		e.dns = &own
	}
	var nameservers []string
	if cfg.Mode == Resolv {
		resolv, err := newResolvConf(own, ns, cfg)
		if err != nil {
			return edits{}, err
		}
		nameservers, e.dns = resolv.upstreams, &resolv.fields
		next.ClusterSearches, next.DNSPolicy, next.DNSConfig = resolv.clusterSearches, own.policy, own.configOrNone()
		if e.sysctls, err = missingSysctls(p, previous); err != nil {
			return edits{}, err
		}
		for _, s := range e.sysctls {
			next.Sysctls = append(next.Sysctls, s.Name)
		}
	}
	e.generate(p, environment(p, nameservers, cfg), cfg, &next)
	if p.hasIstio() {
		e.istioEnv = &corev1.EnvVar{Name: dnsCapture, Value: "false"}
	}
	e.rootCAs, e.status = cfg.RootCAs, string(writeJSON(next))
	return e, nil
}

// generate makes the containers and volumes, and notes them in the status.
func (e *edits) generate(p *pod, variables []corev1.EnvVar, cfg Config, next *status) {
	containers := []corev1.Container{agentContainer(p, variables, cfg)}
	if cfg.Mode == Rules {
		containers = append(containers, captureContainer(variables, cfg))
	}
	for _, c := range containers {
		if cfg.Guard != "" {
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: guardVolume, MountPath: guardDir, ReadOnly: true})
		}
		container, _ := encode(c).(map[string]any)
		e.initContainers = append(e.initContainers, container)
		next.InitContainers[c.Name] = marks(container)
	}
	for _, v := range volumes(cfg) {
		volume := encode(v)
		e.volumes = append(e.volumes, volume)
		next.Volumes[v.Name] = mark(volume)
	}
}

// apply changes a pod.
func (e edits) apply(pod map[string]any) {
	annotations, spec := ensure(ensure(pod, "metadata"), "annotations"), ensure(pod, "spec")
	if e.istioEnv != nil {
		for _, c := range istioElements(spec) {
			env, found := slices.Clone(list(c, "env")), false
			for i := range env {
				if nameOf(env[i]) == e.istioEnv.Name { // it stays in its place
					env[i], found = encode(e.istioEnv), true
				}
			}
			if !found {
				env = append(env, encode(e.istioEnv))
			}
			c["env"] = env
		}
		excludeStatus(annotations, spec)
	}
	spec["initContainers"] = e.containers(list(spec, "initContainers"))
	spec["volumes"] = e.withVolumes(list(spec, "volumes"))
	applyNamed(spec, "imagePullSecrets", e.previous.ImagePullSecrets, e.imagePullSecrets)
	if len(e.sysctls)+len(e.previous.Sysctls) > 0 {
		context := ensure(spec, "securityContext")
		applyNamed(context, "sysctls", e.previous.Sysctls, e.sysctls)
		if len(context) == 0 {
			delete(spec, "securityContext")
		}
	}
	if e.dns != nil {
		setOrDelete(spec, "dnsPolicy", e.dns.policy)
		setOrDelete(spec, "dnsConfig", e.dns.configOrNone())
	}
	if e.ambient {
		annotations[ambientCapture] = "false"
	}
	setOrDelete(annotations, rootCAs, e.rootCAs)
	annotations[Status] = e.status
}

// containers returns the init containers with the added ones first. An added container that is there already keeps what
// others have added to it.
func (e edits) containers(current []any) []any {
	var all []any
	for _, container := range e.initContainers {
		name := text(container, "name")
		if i := named(current, name); i >= 0 && e.previous.addedContainer(name) {
			generated := container
			container, _ = current[i].(map[string]any)
			mergeContainer(container, generated, e.previous.InitContainers[name])
		}
		all = append(all, container)
	}
	return append(all, slices.DeleteFunc(slices.Clone(current), func(c any) bool { return e.previous.addedContainer(nameOf(c)) })...)
}

// withVolumes returns the volumes with the added ones last. An added volume that is there already stays in its place.
func (e edits) withVolumes(current []any) []any {
	all := slices.DeleteFunc(slices.Clone(current), func(v any) bool {
		return e.previous.addedVolume(nameOf(v)) && named(e.volumes, nameOf(v)) < 0
	})
	for _, generated := range e.volumes {
		name := nameOf(generated)
		switch i := named(all, name); {
		case i < 0:
			all = append(all, generated)
		case e.previous.Volumes[name] != mark(generated):
			all[i] = generated
		}
	}
	return all
}

// applyNamed changes the list that is the value of a key. It removes the elements whose names are in the parameter
// removed, and appends the elements in the parameter added. If the list is empty then, it removes the key, too.
func applyNamed[T any](m map[string]any, key string, removed []string, added []T) {
	next := slices.DeleteFunc(slices.Clone(list(m, key)), func(v any) bool { return slices.Contains(removed, nameOf(v)) })
	for _, v := range added {
		next = append(next, encode(v))
	}
	if len(removed)+len(added) > 0 {
		setOrDelete(m, key, next)
	}
}

// setOrDelete sets a key, or deletes it if the value is empty.
func setOrDelete[T any](m map[string]any, key string, v T) {
	if r := reflect.ValueOf(v); r.IsZero() || r.Kind() == reflect.Slice && r.Len() == 0 {
		delete(m, key)
		return
	}
	m[key] = encode(v)
}

// ensure returns the object of a key, which it adds if there is none.
func ensure(m map[string]any, key string) map[string]any {
	if object(m, key) == nil {
		m[key] = map[string]any{}
	}
	return object(m, key)
}

// named returns the index of the element with a name, -1 if the list has none.
func named(list []any, name string) int {
	return slices.IndexFunc(list, func(v any) bool { return nameOf(v) == name })
}

// Status is the annotation that lists, in JSON, what was added to a pod, and what the additions replaced.
const Status = "nametap.dev/status"

// A status is the value of the annotation. The zero value stands for a pod without nametap.
type status struct {
	Mode Mode `json:"mode"`
	// The containers and volumes that were added, by name. The value of a container is the result of the function marks
	// for the container that injection generated. The value of a volume is its mark.
	InitContainers   map[string]string `json:"initContainers"`
	Volumes          map[string]string `json:"volumes"`
	Sysctls          []string          `json:"sysctls,omitempty"`
	ImagePullSecrets []string          `json:"imagePullSecrets,omitempty"`
	// In mode Resolv, the domains of the cluster that were added to the search list, and the DNS fields that the pod
	// had before.
	ClusterSearches []string             `json:"clusterSearches,omitempty"`
	DNSPolicy       string               `json:"dnsPolicy,omitempty"`
	DNSConfig       *corev1.PodDNSConfig `json:"dnsConfig,omitempty"`
}

// parseStatus reads the annotation of a pod. A pod without it has the zero status.
func parseStatus(annotations map[string]string) (status, error) {
	text, ok := annotations[Status]
	if !ok {
		return status{}, nil
	}
	var s status
	err := json.Unmarshal([]byte(text), &s)
	if err == nil && string(writeJSON(s)) != text {
		err = errors.New("want no other keys, and the same form")
	}
	if err != nil {
		return status{}, fmt.Errorf("annotation %s: %.1000q: %w: this version of nametap did not write it; remove it together with what it lists", Status, text, err)
	}
	return s, nil
}

// addedContainer reports whether injection has added a container.
func (s *status) addedContainer(name string) bool {
	_, ok := s.InitContainers[name]
	return ok
}

// addedVolume reports whether injection has added a volume.
func (s *status) addedVolume(name string) bool {
	_, ok := s.Volumes[name]
	return ok
}
