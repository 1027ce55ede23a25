package inject

import (
	"fmt"
	"slices"
)

// Label is the label that asks for injection: Enabled on a namespace, "true" or "false" on a pod.
// The pod's label takes precedence.
const (
	Label   = "nametap.dev/inject"
	Enabled = "enabled"
)

// mirror is the annotation of kubelet's copy of a pod that it runs from a file of the node.
const mirror = "kubernetes.io/config.mirror"

// A Namespace is what the decision about a pod needs to know about its namespace.
type Namespace struct {
	Name                string
	Labels, Annotations map[string]string
	// Requested is true if a pod without a label is injected unless its namespace has another
	// value than Enabled.
	Requested bool
}

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
	ReasonNamespaceSaysNo = `the namespace has another value than ` + Enabled + ` of the label ` + Label
	ReasonUnknownKind     = "nametap inject does not know this kind of object; its pods can get the agent when they are created in a cluster"
	ReasonByHand          = "the pod has a container " + agentName + " or " + captureName + " and no annotation " + Status
)

// decide returns whether a pod is to be injected, and the reason. The order of the cases is the
// precedence: what would do harm, the pod's label, the namespace's label.
func decide(p *pod, ns Namespace, cfg Config) (Outcome, string) {
	label, labelled := p.Metadata.Labels[Label]
	ofNamespace, requested := ns.Labels[Label], ns.Requested && ns.Labels[Label] == ""
	_, isMirror := p.Metadata.Annotations[mirror]
	_, hasStatus := p.Metadata.Annotations[Status]
	switch {
	case slices.Contains(cfg.IgnoredNamespaces, ns.Name):
		return Skipped, ReasonIgnored
	case p.Spec.HostNetwork:
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
	case !hasStatus && (has(p.Spec.InitContainers, agentName, captureName) || has(p.Spec.Containers, agentName, captureName)):
		return Skipped, ReasonByHand
	case labelled:
		return Injected, ReasonPod
	case requested:
		return Injected, ReasonRequested
	}
	return Injected, ReasonNamespace
}

// windows is the operating system for which there is no agent.
const windows = "windows"

// osLabels returns the labels of nodes with their operating system: the current label, and the
// previous one, which kubelet still sets.
func osLabels() []string { return []string{"kubernetes.io/os", "beta.kubernetes.io/os"} }

// forWindows reports whether a pod can run only on nodes with Windows. Each of the terms of an
// affinity is sufficient.
func (p *pod) forWindows() bool {
	terms := p.Spec.Affinity.NodeAffinity.Required.NodeSelectorTerms
	other := func(t nodeSelectorTerm) bool {
		return !slices.ContainsFunc(t.MatchExpressions, func(r nodeSelectorRequirement) bool {
			return slices.Contains(osLabels(), r.Key) && r.Operator == "In" && slices.Equal(r.Values, []string{windows})
		})
	}
	selected := slices.ContainsFunc(osLabels(), func(label string) bool { return p.Spec.NodeSelector[label] == windows })
	return p.Spec.OS.Name == windows || selected || len(terms) > 0 && !slices.ContainsFunc(terms, other)
}
