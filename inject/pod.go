package inject

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
)

// A pod has the fields of a pod, or of the template of a workload, that decide about injection.
type pod struct {
	user    int64 // of the agent
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

// decode reads the fields of a pod. It also reads all others once, since that finds aliases that
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
		return nil, fmt.Errorf("not a valid pod: %w", inOneLine(err))
	}
	return p, nil
}

// goType matches the name of a Go type at the end of an error.
var goType = regexp.MustCompile(` (into|in type) (\[\])?(inject\.\w+|struct \{.*)`)

// inOneLine returns an error of decoding in one line, without the names of Go types.
func inOneLine(err error) error {
	if mismatch := new(yaml.TypeError); errors.As(err, &mismatch) {
		lines := slices.Clone(mismatch.Errors)
		for i, line := range lines {
			lines[i] = goType.ReplaceAllString(line, "")
		}
		return errors.New(strings.Join(lines, "; "))
	}
	return err
}

// has reports whether one of the containers has one of the names.
func has(containers []podContainer, names ...string) bool {
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
	return has(p.Spec.InitContainers, istioProxy) || has(p.Spec.Containers, istioProxy)
}

// application returns the containers of a pod that are neither of nametap nor of Istio.
func (p *pod) application(previous status) []podContainer {
	return slices.DeleteFunc(slices.Concat(p.Spec.InitContainers, p.Spec.Containers), func(c podContainer) bool {
		return slices.Contains(istioContainers, c.Name) || previous.addedContainer(c.Name)
	})
}

// obstacle returns why nametap would not work in a pod, or "". The queries of user and group 1337
// are not redirected, and only one program can listen on a port of the pod.
func obstacle(p *pod, previous status, cfg Config) string {
	ports := portsOf(p, cfg)
	for _, c := range p.application(previous) {
		user, group := p.Spec.SecurityContext.RunAsUser, p.Spec.SecurityContext.RunAsGroup
		if c.SecurityContext.RunAsUser != nil {
			user = c.SecurityContext.RunAsUser
		}
		if c.SecurityContext.RunAsGroup != nil {
			group = c.SecurityContext.RunAsGroup
		}
		switch {
		case cfg.Mode == Rules && user != nil && *user == agentID:
			return fmt.Sprintf("container %.100q runs as user %d (runAsUser), as the agent does, so its queries are not captured: give it another user, or use the mode %s", c.Name, agentID, Resolv)
		case cfg.Mode == Rules && group != nil && *group == agentID:
			return fmt.Sprintf("container %.100q runs as group %d (runAsGroup), as the agent does, so its queries are not captured: give it another group, or use the mode %s", c.Name, agentID, Resolv)
		}
		for _, port := range c.Ports {
			if slices.Contains(ports, port.ContainerPort) {
				return fmt.Sprintf("container %.100q has the port %d, on which the agent listens: give it another port", c.Name, port.ContainerPort)
			}
		}
	}
	return nameTaken(p, previous)
}

// nameTaken returns which of the names of nametap something else in a pod has, or "".
func nameTaken(p *pod, previous status) string {
	kept := slices.DeleteFunc(slices.Clone(p.Spec.InitContainers), func(c podContainer) bool { return previous.addedContainer(c.Name) })
	for _, c := range slices.Concat(kept, p.Spec.Containers) {
		if c.Name == agentName || c.Name == captureName {
			return fmt.Sprintf("the pod has a container %.100q that was not injected: give it another name", c.Name)
		}
	}
	for _, volume := range p.Spec.Volumes {
		if slices.Contains(volumeNames(), volume.Name) && !previous.addedVolume(volume.Name) {
			return fmt.Sprintf("the pod has a volume %.100q that was not injected: give it another name", volume.Name)
		}
	}
	return ""
}
