package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// A Namespace has the properties of a pod's namespace that the decision about the pod needs.
type Namespace struct {
	Name                string
	Labels, Annotations map[string]string
	// Requested is true if pods without a label are injected, unless the namespace has the label with another
	// value than Enabled.
	Requested bool
}

// A pod is a pod, or the template of a workload.
type pod struct {
	corev1.PodTemplateSpec
	user    int64 // the user of the agent
	ambient bool  // whether ztunnel is in the pod
}

// decode reads a pod.
func decode(value map[string]any) (*pod, error) {
	p := new(pod)
	err := json.Unmarshal(writeJSON(value), &p.PodTemplateSpec)
	if wrong := new(json.UnmarshalTypeError); errors.As(err, &wrong) {
		err = fmt.Errorf("%s: Kubernetes takes no %s there", wrong.Field, wrong.Value)
	}
	if err == nil && len(p.Spec.Containers) == 0 {
		err = errors.New("spec.containers is missing")
	}
	if err != nil {
		return nil, fmt.Errorf("not a valid pod: %w", err)
	}
	return p, nil
}

// hasAny reports whether one of the containers has one of the names.
func hasAny(containers []corev1.Container, names ...string) bool {
	return slices.ContainsFunc(containers, func(c corev1.Container) bool { return slices.Contains(names, c.Name) })
}

// The containers of Istio's injector. They run as the same user as the agent, by design.
const (
	istioProxy = "istio-proxy"
	istioInit  = "istio-init"
)

// istioContainers are the names of all containers of Istio's injector.
var istioContainers = []string{istioProxy, istioInit, "istio-validation", "enable-core-dump"} //nolint:gochecknoglobals // a constant

// hasIstio reports whether Istio's sidecar is in the pod, as a container or as a native sidecar.
func (p *pod) hasIstio() bool {
	return hasAny(p.Spec.InitContainers, istioProxy) || hasAny(p.Spec.Containers, istioProxy)
}

// istioElements returns the containers of a pod that have the settings of Istio's DNS capture.
func istioElements(spec map[string]any) []map[string]any {
	var found []map[string]any
	for _, field := range []string{"initContainers", "containers"} {
		for _, v := range list(spec, field) {
			if c, ok := v.(map[string]any); ok && slices.Contains([]string{istioProxy, istioInit}, nameOf(c)) {
				found = append(found, c)
			}
		}
	}
	return found
}

const (
	// dataplaneMode is Istio's label of a pod or a namespace. With the value ambient, ztunnel proxies the pod, and
	// listens on port 15053 in it.
	dataplaneMode = "istio.io/dataplane-mode"
	// ambientCapture is Istio's annotation that switches off the DNS capture of ztunnel.
	ambientCapture = "ambient.istio.io/dns-capture"
)

// isAmbient reports whether a pod is in Istio's ambient mode. A pod with Istio's sidecar is not in that mode, whatever
// its labels are.
func (p *pod) isAmbient(ns Namespace) bool {
	mode, labelled := p.Labels[dataplaneMode]
	if !labelled {
		mode = ns.Labels[dataplaneMode]
	}
	return mode == "ambient" && !p.hasIstio()
}

// windows is the operating system for which there is no agent.
const windows = "windows"

// osLabels returns the labels that name the operating system of a node: the current label, and the
// previous label, which kubelet still sets.
func osLabels() []string { return []string{"kubernetes.io/os", "beta.kubernetes.io/os"} }

// forWindows reports whether a pod can run only on nodes with Windows. A node needs to match only one term of an
// affinity, so all terms must require Windows.
func (p *pod) forWindows() bool {
	var terms []corev1.NodeSelectorTerm
	if a := p.Spec.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		terms = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	other := func(t corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(t.MatchExpressions, func(r corev1.NodeSelectorRequirement) bool {
			return slices.Contains(osLabels(), r.Key) && r.Operator == corev1.NodeSelectorOpIn && slices.Equal(r.Values, []string{windows})
		})
	}
	selected := slices.ContainsFunc(osLabels(), func(label string) bool { return p.Spec.NodeSelector[label] == windows })
	return p.Spec.OS != nil && p.Spec.OS.Name == windows || selected || len(terms) > 0 && !slices.ContainsFunc(terms, other)
}

// application returns the containers of a pod, without Istio's containers and the added containers. added reports
// whether injection has added a container.
func (p *pod) application(added func(name string) bool) []corev1.Container {
	all := slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
	for _, c := range p.Spec.EphemeralContainers {
		all = append(all, corev1.Container(c.EphemeralContainerCommon))
	}
	return slices.DeleteFunc(all, func(c corev1.Container) bool {
		return slices.Contains(istioContainers, c.Name) || added(c.Name)
	})
}
