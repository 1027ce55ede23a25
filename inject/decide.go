package inject

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
)

// Label is the label that decides about injection. Its value is Enabled on a namespace, and "true" or "false" on a pod.
// The pod's label takes precedence.
const (
	Label   = "nametap.dev/inject"
	Enabled = "enabled"
)

// mirror is the annotation of a pod that kubelet runs from a file of the node: the API server only has a copy.
const mirror = "kubernetes.io/config.mirror"

// An Outcome is what happens to a pod.
type Outcome string

// The outcomes.
const (
	Injected Outcome = "injected"
	// Skipped means that the pod is not to be injected, and stays as it is.
	Skipped Outcome = "skipped"
	// Refused means that the pod is to be injected and cannot be. An admission controller rejects it.
	Refused Outcome = "refused"
)

// Reasons to inject or to skip a pod. Reasons to refuse a pod have details.
const (
	ReasonPod             = `the pod has the label ` + Label + `: "true"`
	ReasonRequested       = "no label " + Label + " excludes it"
	ReasonNamespace       = `the namespace has the label ` + Label + `: ` + Enabled
	ReasonIgnored         = "the namespace is ignored"
	ReasonHostNetwork     = "the pod has the network of its node (hostNetwork), whose DNS must not be captured"
	ReasonMirror          = "the pod is a copy of one that the node runs from a file, and cannot be changed"
	ReasonWindows         = "the pod is for Windows"
	ReasonPodSaysNo       = `the pod has the label ` + Label + `: "false"`
	ReasonNotAsked        = `neither the pod nor its namespace has the label ` + Label
	ReasonNamespaceSaysNo = `the namespace's label ` + Label + ` has another value than ` + Enabled
	ReasonUnknownKind     = "nametap inject does not know this kind of object; its pods can get the agent when they are created in a cluster"
	ReasonByHand          = "the pod has a container " + agentName + " or " + captureName + " and no annotation " + Status
)

// decide returns whether a pod is to be injected, and the reason. A pod in which nametap would do harm is skipped,
// whatever its labels are. Otherwise the pod's label decides, and without that label the namespace's label.
func decide(p *pod, ns Namespace, cfg Config) (Outcome, string) {
	label, labelled := p.Labels[Label]
	ofNamespace, requested := ns.Labels[Label], ns.Requested && ns.Labels[Label] == ""
	_, isMirror := p.Annotations[mirror]
	_, hasStatus := p.Annotations[Status]
	switch {
	case slices.Contains(cfg.IgnoredNamespaces, ns.Name):
		return Skipped, ReasonIgnored
	case p.Spec.HostNetwork && p.Annotations[guardAnnotation] == "": // otherwise it is refused
		return Skipped, ReasonHostNetwork
	case isMirror:
		return Skipped, ReasonMirror
	case p.forWindows():
		return Skipped, ReasonWindows
	case labelled && label == "false":
		return Skipped, ReasonPodSaysNo
	case labelled && label != "true":
		return Refused, fmt.Sprintf(`the pod has the label %s: %.100q, want "true" or "false"`, Label, label)
	case !labelled && ofNamespace == "" && !requested:
		return Skipped, ReasonNotAsked
	case !labelled && ofNamespace != Enabled && !requested:
		return Skipped, ReasonNamespaceSaysNo
	case !hasStatus && (hasAny(p.Spec.InitContainers, agentName, captureName) || hasAny(p.Spec.Containers, agentName, captureName)):
		return Skipped, ReasonByHand
	case labelled:
		return Injected, ReasonPod
	case requested:
		return Injected, ReasonRequested
	}
	return Injected, ReasonNamespace
}

// obstacle returns why nametap would not work in a pod; "" if it would. For example, a container may run as user or
// group 1337, whose queries the rules do not redirect. Or it may have a port on which the agent has to listen.
func obstacle(p *pod, previous status, cfg Config) string {
	ports := portsOf(p, cfg)
	for _, c := range p.application(previous.addedContainer) {
		var user, group *int64
		if pod := p.Spec.SecurityContext; pod != nil {
			user, group = pod.RunAsUser, pod.RunAsGroup
		}
		if own := c.SecurityContext; own != nil {
			user, group = cmp.Or(own.RunAsUser, user), cmp.Or(own.RunAsGroup, group)
		}
		for i, id := range []*int64{user, group} {
			if kind := []string{"user", "group"}[i]; cfg.Mode == Rules && id != nil && *id == agentID {
				return fmt.Sprintf("container %.100q runs as %s %d, as the agent does, so its queries are not captured: give it another %s, or, without a guard, use the mode %s", c.Name, kind, agentID, kind, Resolv)
			}
		}
		for _, port := range c.Ports {
			if slices.Contains(ports, int(port.ContainerPort)) {
				return fmt.Sprintf("container %.100q has the port %d, on which the agent listens: give it another port", c.Name, port.ContainerPort)
			}
		}
	}
	return nameTaken(p, previous)
}

// portsOf returns the ports on which the agent listens in a pod.
func portsOf(p *pod, cfg Config) []int {
	ports := []int{portOf(cfg, "dns-addr", dnsPort), statusPort}
	if cfg.Mode == Resolv {
		ports[0] = plainDNS
	}
	if p.hasIstio() {
		ports[1] = besideIstio
	}
	if carriesVIPs(cfg) && !p.hasIstio() {
		ports = append(ports, portOf(cfg, "egress-addr", egressPort))
	}
	return ports
}

// portOf returns the port in a setting, or preset if the setting has no port.
func portOf(cfg Config, setting string, preset int) int {
	_, text, err := net.SplitHostPort(cfg.Settings[setting])
	if port, err2 := strconv.ParseUint(text, 10, 16); err == nil && err2 == nil {
		return int(port) //nolint:gosec // 16 bits
	}
	return preset
}

// nameTaken returns an error text if a container or a volume that injection has not added has one of the names of
// nametap, otherwise "".
func nameTaken(p *pod, previous status) string {
	kept := slices.DeleteFunc(slices.Clone(p.Spec.InitContainers), func(c corev1.Container) bool { return previous.addedContainer(c.Name) })
	for _, c := range slices.Concat(kept, p.Spec.Containers) {
		if c.Name == agentName || c.Name == captureName {
			return fmt.Sprintf("the pod has a container %.100q that was not injected: give it another name", c.Name)
		}
	}
	for _, volume := range p.Spec.Volumes {
		if slices.Contains([]string{tokenVolume, rootCertVolume, stateVolume, guardVolume}, volume.Name) && !previous.addedVolume(volume.Name) {
			return fmt.Sprintf("the pod has a volume %.100q that was not injected: give it another name", volume.Name)
		}
	}
	return ""
}
