package inject

import (
	"slices"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
)

// apply changes a pod. It leaves equal parts as they are, with their comments and their style.
func (e edits) apply(node *yaml.Node) error {
	meta := ensure(node, "metadata", "spec", yaml.MappingNode)
	spec := ensure(node, "spec", "", yaml.MappingNode)
	if e.istioEnv != nil {
		if err := e.switchOff(spec); err != nil {
			return err
		}
	}
	e.applyContainers(ensure(spec, "initContainers", "containers", yaml.SequenceNode))
	e.applyVolumes(ensure(spec, "volumes", "", yaml.SequenceNode))
	if err := applyNamed(spec, "imagePullSecrets", e.previous.ImagePullSecrets, e.imagePullSecrets); err != nil {
		return err
	}
	if err := e.applySysctls(spec); err != nil {
		return err
	}
	if err := e.applyDNS(spec); err != nil {
		return err
	}
	annotations := ensure(meta, "annotations", "", yaml.MappingNode)
	if e.ambient {
		if err := update(annotations, ambientCapture, "false"); err != nil {
			return err
		}
	}
	return update(annotations, Status, e.status)
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
		case e.previous.Volumes[nameOf(generated)] != mark(generated) && !same(list.Content[at], generated, true):
			list.Content[at] = generated
		}
	}
}

// elementOf returns the element of a list with a name, nil if there is none.
func elementOf(list *yaml.Node, name string) *yaml.Node {
	for _, element := range elements(list) {
		if nameOf(element) == name {
			return element
		}
	}
	return nil
}

// switchOff sets the variable of Istio's containers.
func (e edits) switchOff(spec *yaml.Node) error {
	for _, c := range istioElements(spec) {
		if err := setVariable(ensure(c, "env", "", yaml.SequenceNode), *e.istioEnv); err != nil {
			return err
		}
	}
	return nil
}

// istioElements returns the containers of a pod that have the settings of Istio's DNS capture.
func istioElements(spec *yaml.Node) []*yaml.Node {
	var found []*yaml.Node
	for _, field := range []string{"initContainers", "containers"} {
		for _, c := range elements(value(spec, field)) {
			if name := nameOf(c); name == istioProxy || name == istioInit {
				found = append(found, c)
			}
		}
	}
	return found
}

// setVariable sets a variable of a container, wherever it is in the list.
func setVariable(variables *yaml.Node, v corev1.EnvVar) error {
	found := false
	for _, current := range elements(variables) {
		if nameOf(current) != v.Name {
			continue
		}
		found = true
		remove(current, "valueFrom")
		if err := update(current, "value", v.Value); err != nil {
			return err
		}
	}
	if found {
		return nil
	}
	added, err := encode(v)
	variables.Content = append(variables.Content, added)
	return err
}

// applySysctls changes the sysctls. It leaves no empty fields.
func (e edits) applySysctls(spec *yaml.Node) error {
	if len(e.sysctls) == 0 && len(e.previous.Sysctls) == 0 {
		return nil
	}
	context := ensure(spec, "securityContext", "", yaml.MappingNode)
	err := applyNamed(context, "sysctls", e.previous.Sysctls, e.sysctls)
	if len(context.Content) == 0 {
		remove(spec, "securityContext")
	}
	return err
}

// applyDNS changes what kubelet makes resolv.conf from.
func (e edits) applyDNS(spec *yaml.Node) error {
	if e.dns == nil {
		return nil
	}
	if e.dns.policy == "" {
		remove(spec, "dnsPolicy")
	} else if err := update(spec, "dnsPolicy", e.dns.policy); err != nil {
		return err
	}
	if config := e.dns.configOrNone(); config != nil {
		return update(spec, "dnsConfig", config)
	}
	remove(spec, "dnsConfig")
	return nil
}

// applyNamed removes elements of a list by their names, and adds others after all that stay. It leaves no empty list.
func applyNamed[T any](m *yaml.Node, key string, removed []string, added []T) error {
	if len(removed)+len(added) == 0 {
		return nil
	}
	list := ensure(m, key, "", yaml.SequenceNode)
	next, err := encode(append([]T{}, added...))
	if err != nil {
		return err
	}
	kept := slices.DeleteFunc(slices.Clone(elements(list)), func(n *yaml.Node) bool { return slices.Contains(removed, nameOf(n)) })
	if next.Content = append(kept, next.Content...); !same(list, next, true) {
		list.Content = next.Content
	}
	if len(list.Content) == 0 {
		remove(m, key)
	}
	return nil
}

// update sets a key to a value, unless it has that value.
func update(m *yaml.Node, key string, v any) error {
	node, err := encode(v)
	if err == nil {
		put(m, []string{key}, node)
	}
	return err
}
