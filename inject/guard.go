package inject

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// configMapName returns the name of the ConfigMap of a policy. It depends on the content, so a changed policy makes
// workloads replace their pods, and a previous version of a workload keeps the previous policy.
func configMapName(policy []byte) string {
	sum := sha256.Sum256(policy)
	return guardVolume + "-" + hex.EncodeToString(sum[:5])
}

// configMap returns the object with a policy. namespace may be empty.
func configMap(policy []byte, namespace string) map[string]any {
	meta := map[string]any{"name": configMapName(policy)}
	if namespace != "" {
		meta["namespace"] = namespace
	}
	return map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "immutable": true, "data": map[string]any{policyKey: string(policy)}}
}

// wayAround returns how a pod would get around the rules of its guard; "" if it cannot. The rules are those of the network
// of the pod. They let pass what has the agent's user or group.
func wayAround(p *pod, previous status, cfg Config) string {
	if cfg.Guard == "" {
		return ""
	}
	if p.Spec.HostNetwork {
		return "the pod has the network of its node (hostNetwork), which a guard must not limit: remove the field, or exclude the pod from injection"
	}
	if p.ambient || hasAny(p.Spec.InitContainers, istioContainers...) || hasAny(p.Spec.Containers, istioContainers...) {
		return "Istio's proxy carries the connections of the pod, and the guard's rules let it pass: want a pod outside of Istio's data plane, or no guard"
	}
	for _, c := range p.application(previous.addedContainer) {
		if c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged {
			return fmt.Sprintf("container %.100q is privileged, so it can remove the guard's rules: want no privileged container", c.Name)
		}
		if names := escapes(p.Spec.SecurityContext, c.SecurityContext); len(names) > 0 {
			return fmt.Sprintf("container %.100q has the capabilities %s, which get around the guard's rules: want securityContext.capabilities.drop: [ALL]", c.Name, strings.Join(names, ", "))
		}
	}
	if s := p.Spec.SecurityContext; s != nil && (s.FSGroup != nil && *s.FSGroup == agentID || slices.Contains(s.SupplementalGroups, agentID)) {
		return fmt.Sprintf("the pod has the group %d (fsGroup or supplementalGroups), whose connections the guard's rules let pass: give it another group", agentID)
	}
	return ""
}

// escapes returns the capabilities of a container by which a process sends packets that the rules do not see, becomes the
// agent's user, or changes the rules or the agent.
func escapes(ofPod *corev1.PodSecurityContext, own *corev1.SecurityContext) (names []string) {
	ofPod, own = cmp.Or(ofPod, &corev1.PodSecurityContext{}), cmp.Or(own, &corev1.SecurityContext{})
	nonRoot, user := cmp.Or(own.RunAsNonRoot, ofPod.RunAsNonRoot), cmp.Or(own.RunAsUser, ofPod.RunAsUser)
	// Container runtimes give these to all containers, but a process of another user than root has them only by a
	// program that escalates privileges.
	var usual []string
	if unprivileged := nonRoot != nil && *nonRoot || user != nil && *user != 0; !unprivileged || own.AllowPrivilegeEscalation == nil || *own.AllowPrivilegeEscalation {
		usual = []string{"NET_RAW", "SETGID", "SETUID"}
	}
	var added, dropped []string
	if own.Capabilities != nil {
		added, dropped = capabilityNames(own.Capabilities.Add), capabilityNames(own.Capabilities.Drop)
	}
	for _, name := range []string{"BPF", "NET_ADMIN", "NET_RAW", "SETGID", "SETUID", "SYS_ADMIN", "SYS_MODULE", "SYS_PTRACE"} {
		has := slices.Contains(usual, name) && !slices.Contains(dropped, "ALL") || slices.Contains(added, "ALL") || slices.Contains(added, name)
		if has && !slices.Contains(dropped, name) {
			names = append(names, name)
		}
	}
	return names
}

// capabilityNames returns capabilities in the form of Kubernetes. Some runtimes accept other forms.
func capabilityNames(list []corev1.Capability) (names []string) {
	for _, c := range list {
		names = append(names, strings.TrimPrefix(strings.ToUpper(string(c)), "CAP_"))
	}
	return names
}
