package inject

import (
	"errors"
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"

	"github.com/nametap/nametap/internal/yamltext"
)

// A Namespace has the properties of a pod's namespace that the decision about the pod needs.
type Namespace struct {
	Name                string
	Labels, Annotations map[string]string
	// Requested is true if pods without a label are injected, unless the namespace has the label with another
	// value than Enabled.
	Requested bool
}

// A pod has the fields of a pod, or of the template of a workload, that decide about injection.
type pod struct {
	user    int64 // the user of the agent
	ambient bool  // whether ztunnel is in the pod

	Metadata struct {
		Labels      map[string]string `yaml:"labels"`
		Annotations map[string]string `yaml:"annotations"`
	} `yaml:"metadata"`
	Spec struct {
		HostNetwork bool `yaml:"hostNetwork"`
		OS          struct {
			Name string `yaml:"name"`
		} `yaml:"os"`
		NodeSelector map[string]string `yaml:"nodeSelector"`
		Affinity     struct {
			NodeAffinity struct {
				Required struct {
					NodeSelectorTerms []nodeSelectorTerm `yaml:"nodeSelectorTerms"`
				} `yaml:"requiredDuringSchedulingIgnoredDuringExecution"`
			} `yaml:"nodeAffinity"`
		} `yaml:"affinity"`
		DNSPolicy       string               `yaml:"dnsPolicy"`
		DNSConfig       *corev1.PodDNSConfig `yaml:"dnsConfig"`
		SecurityContext struct {
			RunAsUser  *int64          `yaml:"runAsUser"`
			RunAsGroup *int64          `yaml:"runAsGroup"`
			Sysctls    []corev1.Sysctl `yaml:"sysctls"`
		} `yaml:"securityContext"`
		ImagePullSecrets []named        `yaml:"imagePullSecrets"`
		InitContainers   []podContainer `yaml:"initContainers"`
		Containers       []podContainer `yaml:"containers"`
		Volumes          []named        `yaml:"volumes"`
	} `yaml:"spec"`
}

// A named is an element of a list that has a name.
type named struct {
	Name string `yaml:"name"`
}

// A nodeSelectorTerm selects nodes by their labels.
type nodeSelectorTerm struct {
	MatchExpressions []nodeSelectorRequirement `yaml:"matchExpressions"`
}

// A nodeSelectorRequirement is a requirement of a term.
type nodeSelectorRequirement struct {
	Key      string   `yaml:"key"`
	Operator string   `yaml:"operator"`
	Values   []string `yaml:"values"`
}

// A podContainer is a container of the application, or of another injector.
type podContainer struct {
	Name            string `yaml:"name"`
	SecurityContext struct {
		RunAsUser  *int64 `yaml:"runAsUser"`
		RunAsGroup *int64 `yaml:"runAsGroup"`
	} `yaml:"securityContext"`
	Ports []struct {
		ContainerPort int `yaml:"containerPort"`
	} `yaml:"ports"`
}

// decode reads the fields of a pod. It also reads all other fields, because the parser then finds aliases that
// contain themselves or become too large.
func decode(node *yaml.Node) (*pod, error) {
	p := new(pod)
	err := node.Decode(p)
	if err == nil {
		err = node.Decode(new(any))
	}
	if err == nil && len(p.Spec.Containers) == 0 {
		err = errors.New("spec.containers is missing")
	}
	if err != nil {
		return nil, fmt.Errorf("not a valid pod: %w", yamltext.OneLine(err))
	}
	return p, nil
}

// hasAny reports whether one of the containers has one of the names.
func hasAny(containers []podContainer, names ...string) bool {
	return slices.ContainsFunc(containers, func(c podContainer) bool { return slices.Contains(names, c.Name) })
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
	mode, labelled := p.Metadata.Labels[dataplaneMode]
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
	terms := p.Spec.Affinity.NodeAffinity.Required.NodeSelectorTerms
	other := func(t nodeSelectorTerm) bool {
		return !slices.ContainsFunc(t.MatchExpressions, func(r nodeSelectorRequirement) bool {
			return slices.Contains(osLabels(), r.Key) && r.Operator == "In" && slices.Equal(r.Values, []string{windows})
		})
	}
	selected := slices.ContainsFunc(osLabels(), func(label string) bool { return p.Spec.NodeSelector[label] == windows })
	return p.Spec.OS.Name == windows || selected || len(terms) > 0 && !slices.ContainsFunc(terms, other)
}

// application returns the containers of a pod, without Istio's containers and the added containers. added reports
// whether injection has added a container.
func (p *pod) application(added func(name string) bool) []podContainer {
	return slices.DeleteFunc(slices.Concat(p.Spec.InitContainers, p.Spec.Containers), func(c podContainer) bool {
		return slices.Contains(istioContainers, c.Name) || added(c.Name)
	})
}
