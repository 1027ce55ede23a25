package inject

import (
	"errors"
	"slices"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
)

// edits are all changes of one pod. The parts that an earlier injection added are found by their names.
type edits struct {
	previous         status
	initContainers   []*yaml.Node // go before all others
	volumes          []*yaml.Node // go after all others
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
	previous, err := parseStatus(p.Metadata.Annotations)
	if err != nil {
		return edits{}, err
	}
	if cfg, err = cfg.forPod(p, ns); err != nil {
		return edits{}, err
	}
	if reason := obstacle(p, previous, cfg); reason != "" {
		return edits{}, errors.New(reason)
	}
	next, e := status{Mode: cfg.Mode, InitContainers: map[string]string{}, Volumes: map[string]string{}}, edits{previous: previous, ambient: p.ambient}
	for _, name := range cfg.ImagePullSecrets {
		if own := slices.Contains(p.Spec.ImagePullSecrets, named{name}); !own || slices.Contains(previous.ImagePullSecrets, name) {
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
	e.rootCAs, e.status = cfg.RootCAs, next.text()
	return e, nil
}

// generate makes the containers and volumes, and notes them in the status.
func (e *edits) generate(p *pod, variables []corev1.EnvVar, cfg Config, next *status) {
	containers := []corev1.Container{agentContainer(p, variables, cfg)}
	if cfg.Mode == Rules {
		containers = append(containers, captureContainer(variables, cfg))
	}
	for _, c := range containers {
		node := encode(c)
		e.initContainers = append(e.initContainers, node)
		next.InitContainers[c.Name] = marks(node)
	}
	for _, v := range volumes(cfg) {
		node := encode(v)
		e.volumes = append(e.volumes, node)
		next.Volumes[v.Name] = mark(node)
	}
}

// apply changes a pod. Parts that need no change keep their comments and their style.
func (e edits) apply(node *yaml.Node) {
	meta := ensure(node, "metadata", "spec", yaml.MappingNode)
	spec := ensure(node, "spec", "", yaml.MappingNode)
	annotations := ensure(meta, "annotations", "", yaml.MappingNode)
	if e.istioEnv != nil {
		for _, c := range istioElements(spec) {
			setVariable(ensure(c, "env", "", yaml.SequenceNode), *e.istioEnv)
		}
		excludeStatus(annotations, spec)
	}
	e.applyContainers(ensure(spec, "initContainers", "containers", yaml.SequenceNode))
	e.applyVolumes(ensure(spec, "volumes", "", yaml.SequenceNode))
	applyNamed(spec, "imagePullSecrets", e.previous.ImagePullSecrets, e.imagePullSecrets)
	e.applySysctls(spec)
	e.applyDNS(spec)
	if e.ambient {
		update(annotations, ambientCapture, "false")
	}
	if e.rootCAs != "" {
		update(annotations, rootCAs, e.rootCAs)
	} else {
		remove(annotations, rootCAs)
	}
	update(annotations, Status, e.status)
}

// applyContainers puts the containers before all others. A container that is there already keeps
// what others have added.
func (e edits) applyContainers(list *yaml.Node) {
	var first, others []*yaml.Node
	for _, generated := range e.initContainers {
		container := elementOf(list, nameOf(generated))
		if container == nil || !e.previous.addedContainer(nameOf(generated)) {
			container = generated
		} else {
			mergeContainer(container, generated, e.previous.InitContainers[nameOf(generated)])
		}
		first = append(first, container)
	}
	for _, c := range elements(list) {
		if !e.previous.addedContainer(nameOf(c)) {
			others = append(others, c)
		}
	}
	list.Content = append(first, others...)
}

// applyVolumes puts the volumes after all others. A volume that is there already stays in its
// place.
func (e edits) applyVolumes(list *yaml.Node) {
	names := volumeNames()
	list.Content = slices.DeleteFunc(elements(list), func(v *yaml.Node) bool {
		return e.previous.addedVolume(nameOf(v)) && !slices.Contains(names, nameOf(v))
	})
	for _, generated := range e.volumes {
		at := slices.IndexFunc(list.Content, func(v *yaml.Node) bool { return nameOf(v) == nameOf(generated) })
		switch {
		case at < 0:
			list.Content = append(list.Content, generated)
		case e.previous.Volumes[nameOf(generated)] != mark(generated) && !sameTree(list.Content[at], generated, true):
			list.Content[at] = generated
		}
	}
}

// setVariable sets a variable of a container, wherever it is in the list.
func setVariable(variables *yaml.Node, v corev1.EnvVar) {
	found := false
	for _, current := range elements(variables) {
		if nameOf(current) == v.Name {
			found = true
			remove(current, "valueFrom")
			update(current, "value", v.Value)
		}
	}
	if !found {
		variables.Content = append(variables.Content, encode(v))
	}
}

// applySysctls changes the sysctls. It leaves no empty fields.
func (e edits) applySysctls(spec *yaml.Node) {
	if len(e.sysctls) == 0 && len(e.previous.Sysctls) == 0 {
		return
	}
	context := ensure(spec, "securityContext", "", yaml.MappingNode)
	applyNamed(context, "sysctls", e.previous.Sysctls, e.sysctls)
	if len(context.Content) == 0 {
		remove(spec, "securityContext")
	}
}

// applyDNS changes the fields from which kubelet makes resolv.conf.
func (e edits) applyDNS(spec *yaml.Node) {
	if e.dns == nil {
		return
	}
	if e.dns.policy == "" {
		remove(spec, "dnsPolicy")
	} else {
		update(spec, "dnsPolicy", e.dns.policy)
	}
	if config := e.dns.configOrNone(); config != nil {
		update(spec, "dnsConfig", config)
	} else {
		remove(spec, "dnsConfig")
	}
}

// applyNamed changes the list that is the value of the key. It removes the elements whose names are in the parameter
// removed, and appends the elements in the parameter added. If the list is empty then, it removes the key, too.
func applyNamed[T any](m *yaml.Node, key string, removed []string, added []T) {
	if len(removed)+len(added) == 0 {
		return
	}
	list := ensure(m, key, "", yaml.SequenceNode)
	next := encode(append([]T{}, added...))
	kept := slices.DeleteFunc(slices.Clone(elements(list)), func(n *yaml.Node) bool { return slices.Contains(removed, nameOf(n)) })
	if next.Content = append(kept, next.Content...); !sameTree(list, next, true) {
		list.Content = next.Content
	}
	if len(list.Content) == 0 {
		remove(m, key)
	}
}

// update sets a key to a value, unless it has that value.
func update(m *yaml.Node, key string, v any) { setPath(m, []string{key}, encode(v)) }
