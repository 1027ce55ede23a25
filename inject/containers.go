package inject

import (
	"maps"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Names, and numbers that the agent and the manifests in deploy/kubernetes have, too.
const (
	agentName   = "nametap"
	captureName = "nametap-capture"

	tokenVolume    = "nametap-token"
	rootCertVolume = "nametap-root-cert"
	stateVolume    = "nametap-state"

	agentID    = 1337
	dnsPort    = 15053
	statusPort = 15020
	egressPort = 15054
	// besideIstio is the status port if Istio's agent is in the pod, which has 15020 itself.
	besideIstio = 15055
	// plainDNS is the port of the agent in mode Resolv: resolv.conf cannot name another.
	plainDNS = 53

	loopback = "127.0.0.1"

	// program is the agent in its image.
	program = "/usr/local/bin/nametap"
	// awaitAgent is how long the start of a pod waits for the agent's listeners, and then for its table.
	awaitAgent = "30s"
)

// volumeNames returns the names of the volumes that are added.
func volumeNames() []string { return []string{tokenVolume, rootCertVolume, stateVolume} }

// portsOf returns the ports on which the agent listens in a pod.
func portsOf(p *pod, cfg Config) []int {
	ports := []int{dnsPort, statusPort}
	if cfg.Mode == Resolv {
		ports[0] = plainDNS
	}
	if p.hasIstio() {
		ports[1] = besideIstio
	}
	if carriesVIPs(cfg) && !p.hasIstio() {
		ports = append(ports, egressPortOf(cfg))
	}
	return ports
}

// carriesVIPs reports whether the settings have the agent carry connections to VIPs.
func carriesVIPs(cfg Config) bool {
	on, _ := strconv.ParseBool(cfg.Settings["egress"]) // checkSettings has checked the value
	return on
}

// egressPortOf returns the port of the agent for connections to VIPs.
func egressPortOf(cfg Config) int {
	_, text, err := net.SplitHostPort(cfg.Settings["egress-addr"])
	if port, err2 := strconv.ParseUint(text, 10, 16); err == nil && err2 == nil {
		return int(port) //nolint:gosec // 16 bits
	}
	return egressPort
}

// A container is one that is added to a pod. The order of the fields is that of the YAML.
type container struct {
	Name            string          `yaml:"name"`
	Image           string          `yaml:"image"`
	ImagePullPolicy string          `yaml:"imagePullPolicy"`
	Args            []string        `yaml:"args"`
	RestartPolicy   string          `yaml:"restartPolicy,omitempty"`
	Env             []env           `yaml:"env"`
	SecurityContext securityContext `yaml:"securityContext"`
	Ports           []port          `yaml:"ports,omitempty"`
	Lifecycle       *lifecycle      `yaml:"lifecycle,omitempty"`
	ReadinessProbe  *probe          `yaml:"readinessProbe,omitempty"`
	LivenessProbe   *probe          `yaml:"livenessProbe,omitempty"`
	Resources       resources       `yaml:"resources"`
	VolumeMounts    []mount         `yaml:"volumeMounts,omitempty"`
}

type env struct {
	Name      string     `yaml:"name"`
	Value     *string    `yaml:"value,omitempty"`
	ValueFrom *valueFrom `yaml:"valueFrom,omitempty"`
}

type valueFrom struct {
	FieldRef struct {
		FieldPath string `yaml:"fieldPath"`
	} `yaml:"fieldRef"`
}

type securityContext struct {
	RunAsUser                int            `yaml:"runAsUser"`
	RunAsGroup               int            `yaml:"runAsGroup"`
	RunAsNonRoot             bool           `yaml:"runAsNonRoot"`
	AllowPrivilegeEscalation bool           `yaml:"allowPrivilegeEscalation"`
	ReadOnlyRootFilesystem   bool           `yaml:"readOnlyRootFilesystem"`
	Capabilities             capabilities   `yaml:"capabilities"`
	SeccompProfile           seccompProfile `yaml:"seccompProfile"`
}

type capabilities struct {
	Drop []string `yaml:"drop"`
	Add  []string `yaml:"add,omitempty"`
}

type seccompProfile struct {
	Type string `yaml:"type"`
}

type port struct {
	Name          string `yaml:"name"`
	ContainerPort int    `yaml:"containerPort"`
}

type lifecycle struct {
	PostStart hook `yaml:"postStart"`
}

type hook struct {
	Exec execAction `yaml:"exec"`
}

type probe struct {
	HTTPGet                       *httpGet    `yaml:"httpGet,omitempty"`
	Exec                          *execAction `yaml:"exec,omitempty"`
	PeriodSeconds                 int         `yaml:"periodSeconds"`
	TimeoutSeconds                int         `yaml:"timeoutSeconds,omitempty"`
	FailureThreshold              int         `yaml:"failureThreshold,omitempty"`
	TerminationGracePeriodSeconds int         `yaml:"terminationGracePeriodSeconds,omitempty"`
}

type httpGet struct {
	Path string `yaml:"path"`
	Port string `yaml:"port"`
}

type execAction struct {
	Command []string `yaml:"command"`
}

type resources struct {
	Requests map[string]string `yaml:"requests"`
	Limits   map[string]string `yaml:"limits"`
}

type mount struct {
	Name      string `yaml:"name"`
	MountPath string `yaml:"mountPath"`
}

type volume struct {
	Name      string     `yaml:"name"`
	Projected *projected `yaml:"projected,omitempty"`
	ConfigMap *configMap `yaml:"configMap,omitempty"`
	EmptyDir  *struct{}  `yaml:"emptyDir,omitempty"`
}

type projected struct {
	Sources []source `yaml:"sources"`
}

type source struct {
	ServiceAccountToken token `yaml:"serviceAccountToken"`
}

type token struct {
	Path              string `yaml:"path"`
	Audience          string `yaml:"audience"`
	ExpirationSeconds int    `yaml:"expirationSeconds"`
}

type configMap struct {
	Name string `yaml:"name"`
}

// volumes returns the volumes of the agent. deploy/kubernetes explains them.
func volumes(cfg Config) []volume {
	return []volume{
		{Name: tokenVolume, Projected: &projected{[]source{{token{"istio-token", "istio-ca", 43200}}}}},
		{Name: rootCertVolume, ConfigMap: &configMap{cfg.RootCert}},
		{Name: stateVolume, EmptyDir: &struct{}{}},
	}
}

// agentContainer returns the sidecar. deploy/kubernetes explains its fields.
func agentContainer(p *pod, variables []env, cfg Config) container {
	c := container{
		Name: agentName, Image: cfg.Image, ImagePullPolicy: cfg.ImagePullPolicy,
		Args:            []string{"agent", "--supervise"},
		RestartPolicy:   "Always",
		Env:             variables,
		SecurityContext: confined(agentID),
		ReadinessProbe:  &probe{PeriodSeconds: 5},
		LivenessProbe:   &probe{PeriodSeconds: 5, TimeoutSeconds: 2, FailureThreshold: 6, TerminationGracePeriodSeconds: 1},
		Resources:       resources{map[string]string{"cpu": "10m", "memory": "64Mi"}, map[string]string{"memory": "192Mi"}},
		VolumeMounts: []mount{
			{tokenVolume, "/var/run/secrets/tokens"},
			{rootCertVolume, "/var/run/secrets/istio"},
			{stateVolume, "/var/lib/nametap"},
		},
	}
	if cfg.Mode == Resolv {
		// No container waits for the agent, so kubelet does: it starts the next container when the hook
		// has ended. A startup probe would add its period, a second. After --ready-timeout the agent is
		// ready without a table.
		c.Lifecycle = &lifecycle{hook{execAction{[]string{program, "status", "--wait", awaitAgent}}}}
	}
	for path, target := range map[string]*probe{"/healthz/ready": c.ReadinessProbe, "/healthz/live": c.LivenessProbe} {
		if !p.hasIstio() {
			target.HTTPGet = &httpGet{path, "status"}
		}
	}
	if p.hasIstio() {
		// Istio's rules send what comes from outside to Envoy, probes included, and Envoy refuses
		// what has no certificate. So kubelet runs a program instead.
		query := &execAction{[]string{program, "query", "localhost", "A"}}
		c.ReadinessProbe.Exec, c.LivenessProbe.Exec = query, query
		c.ReadinessProbe.TimeoutSeconds = c.LivenessProbe.TimeoutSeconds
	} else {
		c.Ports = []port{{"status", statusPort}}
	}
	return c
}

// captureContainer returns the container that sets the rules. deploy/kubernetes explains its fields.
func captureContainer(variables []env, cfg Config) container {
	rights := confined(0)
	rights.Capabilities.Add = []string{"NET_ADMIN", "NET_RAW"}
	return container{
		Name: captureName, Image: cfg.InitImage, ImagePullPolicy: cfg.ImagePullPolicy,
		Args:            []string{"capture", "apply"},
		Env:             variables,
		SecurityContext: rights,
		Resources:       resources{map[string]string{"cpu": "10m", "memory": "32Mi"}, map[string]string{"memory": "64Mi"}},
	}
}

// confined returns the fewest rights of a user. The profile of seccomp is there for namespaces with
// the Pod Security level restricted, whose pods may have it in their containers only.
func confined(user int) securityContext {
	return securityContext{
		RunAsUser: user, RunAsGroup: user, RunAsNonRoot: user != 0, ReadOnlyRootFilesystem: true,
		Capabilities:   capabilities{Drop: []string{"ALL"}},
		SeccompProfile: seccompProfile{"RuntimeDefault"},
	}
}

// proxyConfig is Istio's annotation with settings of a pod, in YAML.
const proxyConfig = "proxy.istio.io/config"

// discoveryAddress matches a proxyConfig with an address of the control plane, which replaces that of the
// Config. The annotation may have errors, which are the agent's to report, so it is not parsed. The pattern does not
// match comments, longer keys, and keys without a value.
const discoveryAddress = `(^|[\n{,])[ \t]*["']?discoveryAddress["']?[ \t]*:[ \t]*["']?[^ \t\r\n"'#,}]`

var discoveryAddressPattern = regexp.MustCompile(discoveryAddress)

// environment returns the settings of both containers. nameservers are those of mode Resolv.
func environment(p *pod, nameservers []string, cfg Config) []env {
	var list environ
	list.field("POD_NAME", "metadata.name")
	list.field("POD_NAMESPACE", "metadata.namespace")
	list.field("INSTANCE_IP", "status.podIP")
	list.field("HOST_IP", "status.hostIP")
	list.field("NAMETAP_SERVICE_ACCOUNT", "spec.serviceAccountName")
	list.field("PROXY_CONFIG", "metadata.annotations['"+proxyConfig+"']")
	list.set("NAMETAP_ORIGINAL_DESTINATION", "false")
	if cfg.Mode == Rules {
		list.set("NAMETAP_CAPTURE_WAIT", awaitAgent)
	}
	list.set("NAMETAP_READY_TIMEOUT", "3s")
	list.set("NAMETAP_DRAIN", "0s")
	list.set("GOMEMLIMIT", "160MiB")
	if cfg.ControlPlane != "" && !discoveryAddressPattern.MatchString(p.Metadata.Annotations[proxyConfig]) {
		list.set(variable("xds-addr"), cfg.ControlPlane)
	}
	if cfg.ClusterID != "" {
		list.set(variable("cluster-id"), cfg.ClusterID)
	}
	if cfg.ClusterDomain != DefaultConfig().ClusterDomain {
		list.set(variable("domain"), cfg.ClusterDomain)
	}
	if cfg.Mode == Resolv {
		list.set(variable("dns-addr"), net.JoinHostPort(loopback, strconv.Itoa(plainDNS)))
		list.set(variable("upstream"), strings.Join(nameservers, ","))
	}
	if p.hasIstio() {
		list.set(variable("status-addr"), net.JoinHostPort(loopback, strconv.Itoa(besideIstio)))
	}
	if p.hasIstio() && carriesVIPs(cfg) { // Envoy does, if DNS has them
		list.set(variable("dns-auto-allocate"), "true")
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Settings)) {
		if name == "egress" && p.hasIstio() {
			continue // the rules would take the connections from Envoy
		}
		list.set(variable(name), cfg.Settings[name])
	}
	return list
}

// An environ is a list of environment variables, each once.
type environ []env

func (e *environ) field(name, path string) {
	from := new(valueFrom)
	from.FieldRef.FieldPath = path
	*e = append(*e, env{Name: name, ValueFrom: from})
}

// set sets a variable, in its place if it is in the list.
func (e *environ) set(name, value string) {
	if i := slices.IndexFunc(*e, func(v env) bool { return v.Name == name }); i >= 0 {
		(*e)[i] = env{Name: name, Value: &value}
		return
	}
	*e = append(*e, env{Name: name, Value: &value})
}
