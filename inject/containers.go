package inject

import (
	"maps"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// volumes returns the volumes of the agent. deploy/kubernetes/istiod.yaml explains them.
func volumes(cfg Config) []corev1.Volume {
	lifetime, optional := int64(43200), true
	_, files := cfg.Resources.memory()
	size := resource.NewQuantity(files<<20, resource.BinarySI)
	token := corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "istio-token", Audience: "istio-ca", ExpirationSeconds: &lifetime}}
	root := corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: cfg.RootCert}, Optional: &optional}}
	if cfg.RootCAs != "" {
		annotation := &corev1.ObjectFieldSelector{FieldPath: "metadata.annotations['" + rootCAs + "']"}
		root = corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: []corev1.DownwardAPIVolumeFile{{Path: rootFile, FieldRef: annotation}}}}
	}
	all := []corev1.Volume{
		{Name: tokenVolume, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{token}}}},
		{Name: rootCertVolume, VolumeSource: root},
		{Name: stateVolume, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: size}}},
	}
	if cfg.Guard != "" {
		policy := &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: cfg.Guard}, Items: []corev1.KeyToPath{{Key: policyKey, Path: policyKey}}}
		all = append(all, corev1.Volume{Name: guardVolume, VolumeSource: corev1.VolumeSource{ConfigMap: policy}})
	}
	return all
}

// agentContainer returns the sidecar. deploy/kubernetes/istiod.yaml explains its fields.
func agentContainer(p *pod, variables []corev1.EnvVar, cfg Config) corev1.Container {
	always := corev1.ContainerRestartPolicyAlways
	grace := int64(1)
	c := corev1.Container{
		Name: agentName, Image: cfg.Image, ImagePullPolicy: corev1.PullPolicy(cfg.ImagePullPolicy),
		Args:            []string{"agent", "--supervise"},
		RestartPolicy:   &always,
		Env:             variables,
		SecurityContext: confined(p.user),
		ReadinessProbe:  &corev1.Probe{PeriodSeconds: 5},
		LivenessProbe:   &corev1.Probe{PeriodSeconds: 5, TimeoutSeconds: 2, FailureThreshold: 6, TerminationGracePeriodSeconds: &grace},
		Resources:       cfg.Resources.requirements(),
		VolumeMounts: []corev1.VolumeMount{
			{Name: tokenVolume, MountPath: "/var/run/secrets/tokens"},
			{Name: rootCertVolume, MountPath: "/var/run/secrets/istio"},
			{Name: stateVolume, MountPath: "/var/lib/nametap"},
		},
	}
	if cfg.Mode == Resolv {
		// No container waits for the agent, so kubelet waits: it starts the next container when the hook
		// has ended. A startup probe would add its period, a second. After 3 s the agent is ready even without a
		// table.
		c.Lifecycle = &corev1.Lifecycle{PostStart: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{program, "status", "--wait", awaitAgent}}}}
	}
	c.Ports = []corev1.ContainerPort{{Name: "status", ContainerPort: statusPort}}
	if !p.hasIstio() {
		c.ReadinessProbe.HTTPGet = &corev1.HTTPGetAction{Path: "/healthz/ready", Port: intstr.FromString("status")}
		c.LivenessProbe.HTTPGet = &corev1.HTTPGetAction{Path: "/healthz/live", Port: intstr.FromString("status")}
		return c
	}
	// Istio's injector rewrites HTTP probes, and its rules send connections to Envoy if it has written them with another template
	// than the one that excludeStatus knows. So kubelet runs a program instead.
	c.Ports[0].ContainerPort = besideIstio
	query := &corev1.ExecAction{Command: []string{program, "query", "localhost", "A"}}
	c.ReadinessProbe.Exec, c.LivenessProbe.Exec = query, query
	c.ReadinessProbe.TimeoutSeconds = c.LivenessProbe.TimeoutSeconds
	return c
}

// captureContainer returns the container that sets the rules. deploy/kubernetes/istiod.yaml explains its fields.
func captureContainer(variables []corev1.EnvVar, cfg Config) corev1.Container {
	rights := confined(0)
	rights.Capabilities.Add = []corev1.Capability{"NET_ADMIN", "NET_RAW"}
	return corev1.Container{
		Name: captureName, Image: cfg.InitImage, ImagePullPolicy: corev1.PullPolicy(cfg.ImagePullPolicy),
		Args:            []string{"capture", "apply"},
		Env:             variables,
		SecurityContext: rights,
		Resources:       cfg.Resources.requirements(),
	}
}

// confined returns the security context of user with the fewest rights. It has a profile of seccomp, because the Pod
// Security level restricted requires one for each container, and the pod itself may have none.
func confined(user int64) *corev1.SecurityContext {
	yes, no := true, false
	c := &corev1.SecurityContext{
		RunAsUser: &user, RunAsGroup: &user, RunAsNonRoot: &yes, AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
		Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	if user == 0 {
		c.RunAsNonRoot = &no
	}
	return c
}

// proxyConfig is Istio's annotation with settings of a pod, in YAML.
const proxyConfig = "proxy.istio.io/config"

// proxySets reports whether the pod's proxyConfig sets a key, which then precedes the Config. The annotation is not
// parsed, because it may have errors, which the agent reports.
func proxySets(p *pod, key string) bool {
	set := regexp.MustCompile(`(^|[\n{,])[ \t]*["']?` + key + `["']?[ \t]*:[ \t]*["']?[^ \t\r\n"'#,}]`)
	return set.MatchString(p.Annotations[proxyConfig])
}

// environment returns the settings of both containers. nameservers are for mode Resolv.
func environment(p *pod, nameservers []string, cfg Config) []corev1.EnvVar {
	var list environ
	list.field("POD_NAME", "metadata.name")
	list.field("POD_NAMESPACE", "metadata.namespace")
	list.field("INSTANCE_IP", "status.podIP")
	list.field("HOST_IP", "status.hostIP")
	list.field("NAMETAP_SERVICE_ACCOUNT", "spec.serviceAccountName")
	list.field("PROXY_CONFIG", "metadata.annotations['"+proxyConfig+"']")
	if cfg.Mode == Rules {
		list.set("NAMETAP_CAPTURE_WAIT", awaitAgent)
	}
	list.set("NAMETAP_DRAIN", "0s")
	if runtime, _ := cfg.Resources.memory(); runtime > 0 {
		list.set(goMemory, strconv.FormatInt(runtime, 10)+"MiB")
	}
	list.mesh(p, cfg)
	if cfg.ControlPlane != "" && !proxySets(p, "discoveryAddress") {
		list.set(variable("xds-addr"), cfg.ControlPlane)
	}
	if cfg.ClusterID != "" {
		list.set(variable("cluster-id"), cfg.ClusterID)
	}
	if cfg.ClusterDomain != DefaultConfig().ClusterDomain {
		list.set(variable("domain"), cfg.ClusterDomain)
	}
	if cfg.Guard != "" {
		list.set(variable("guard"), guardDir+"/"+policyKey)
	}
	if cfg.Mode == Resolv {
		list.set(variable("dns-addr"), net.JoinHostPort(loopback, strconv.Itoa(plainDNS)))
		list.set(variable("upstream"), strings.Join(nameservers, ","))
	}
	if p.hasIstio() {
		list.set(variable("status-addr"), net.JoinHostPort("", strconv.Itoa(besideIstio)))
	}
	if p.hasIstio() && carriesVIPs(cfg) { // if the agent answers with VIPs, Envoy carries the connections to them
		list.set(variable("dns-auto-allocate"), "true")
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Settings)) {
		if name == "egress" && p.hasIstio() {
			continue // the rules would take the connections from Envoy
		}
		if name == "dns-addr" && cfg.Mode == Resolv {
			continue // in this mode, resolv.conf fixes the address
		}
		list.set(variable(name), cfg.Settings[name])
	}
	return list
}

// An environ is a list of environment variables. Each name occurs once.
type environ []corev1.EnvVar

// mesh sets the switches of the mesh config, unless the pod's proxyConfig does.
func (e *environ) mesh(p *pod, cfg Config) {
	for _, name := range []string{dnsCapture, dnsAutoAllocate} {
		// Connections to automatic VIPs need Envoy or the agent's egress. With a malformed value, no agent would start.
		useful := name == dnsCapture || p.hasIstio() || carriesVIPs(cfg)
		if _, err := strconv.ParseBool(cfg.ProxyMetadata[name]); err == nil && useful && !proxySets(p, name) {
			e.set(name, cfg.ProxyMetadata[name])
		}
	}
}

func (e *environ) field(name, path string) {
	*e = append(*e, corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}})
}

// set sets a variable. If the list already has the variable, set changes its value in place.
func (e *environ) set(name, value string) {
	v := corev1.EnvVar{Name: name, Value: value}
	if i := slices.IndexFunc(*e, func(v corev1.EnvVar) bool { return v.Name == name }); i >= 0 {
		(*e)[i] = v
		return
	}
	*e = append(*e, v)
}
