package inject

import (
	"bytes"
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/internal/yamltext"
)

// A Mode is a way to bring the queries of a pod to the agent.
type Mode string

// The modes.
const (
	// Rules redirects port 53 to the agent by iptables rules, which an init container with
	// NET_ADMIN sets. resolv.conf stays as it is.
	Rules Mode = "rules"
	// Resolv makes the agent the only nameserver of the pod's resolv.conf. No container needs a
	// capability. Queries to other nameservers are not redirected.
	Resolv Mode = "resolv"
)

// A Config says what is added to pods. The zero value of a field stands for its value in
// DefaultConfig.
type Config struct {
	Mode Mode `yaml:"mode"`

	// Image is the image of the agent. InitImage is the image of the container that sets the rules.
	Image           string `yaml:"image"`
	InitImage       string `yaml:"initImage"`
	ImagePullPolicy string `yaml:"imagePullPolicy"`

	// ControlPlane is the host:port of the control plane. A pod with a discoveryAddress in its
	// annotation proxy.istio.io/config uses that address. If both are missing, the agent uses istiod.
	ControlPlane string `yaml:"controlPlane"`
	// RootCert is the ConfigMap, in the namespace of each pod, with the root certificate of the
	// control plane.
	RootCert string `yaml:"rootCert"`
	// RootCAFiles are files, where injection runs, with root certificates of the control plane in PEM. If there are any,
	// pods get these certificates in an annotation, and RootCert does not count.
	RootCAFiles []string `yaml:"rootCAFiles"`
	// RootCAs are the certificates in RootCAFiles, see ReadRootCAs.
	RootCAs string `yaml:"-"`
	// ClusterID is the name that the control plane has for the cluster; if it is empty, the agent uses its default.
	ClusterID string `yaml:"clusterID"`
	// ClusterDomain is the domain of Services.
	ClusterDomain string `yaml:"clusterDomain"`
	// Nameservers are the addresses of the cluster's DNS. Mode Resolv needs them, because kubelet
	// does not write them to resolv.conf in that mode.
	Nameservers []string `yaml:"nameservers"`

	// Guard is the ConfigMap, in the namespace of each pod, with the policy of a guard in the key policy.yaml; empty for no
	// guard.
	Guard string `yaml:"guard"`
	// Policy is the text of a policy for all pods of a manifest, whatever their annotations say; nil for none. [Manifest]
	// adds ConfigMaps with it.
	Policy []byte `yaml:"-"`

	// Resources apply to each of the two containers, unless annotations of the pod set others. The
	// memory limit also sets how much memory Go's runtime uses.
	Resources Resources `yaml:"resources"`

	// ImagePullSecrets are the names of Secrets, in the namespace of each pod, for the registry of the images.
	ImagePullSecrets []string `yaml:"imagePullSecrets"`

	// Settings are other settings of `nametap agent`, by the names of their flags. Both containers
	// get them.
	Settings map[string]string `yaml:"settings"`

	// ProxyMetadata has the environment variables of defaultConfig.proxyMetadata in Istio's mesh config. Pods get those
	// about DNS, unless their annotation proxy.istio.io/config sets them.
	ProxyMetadata map[string]string `yaml:"-"`

	// IgnoredNamespaces are namespaces whose pods are never injected, even if they are labelled.
	IgnoredNamespaces []string `yaml:"ignoredNamespaces"`
}

// DefaultConfig returns the defaults, which are the values in deploy/kubernetes/istiod.yaml.
func DefaultConfig() Config {
	return Config{
		Mode:            Rules,
		Image:           "nametap:" + version.Release(),
		InitImage:       "nametap-init:" + version.Release(),
		ImagePullPolicy: "IfNotPresent",
		RootCert:        "istio-ca-root-cert",
		ClusterDomain:   "cluster.local",
		Resources:       defaultResources(),
		// The namespaces of Kubernetes itself, because nametap and its control plane need the pods in them, and the
		// namespaces of the control planes.
		IgnoredNamespaces: []string{"kube-system", "kube-public", "kube-node-lease", "istio-system", "nametap-system"},
	}
}

// ParseConfig reads a file of settings. A setting that the file lacks has its default. ParseConfig refuses unknown and
// repeated keys.
func ParseConfig(text []byte) (Config, error) {
	cfg := DefaultConfig()
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	decoder.KnownFields(true)
	if err := decoder.Decode(&cfg); err != nil && !errors.Is(err, io.EOF) {
		return Config{}, yamltext.OneLine(err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return Config{}, errors.New("want one document")
	}
	return cfg, nil
}

// maxRootCAs bounds RootCAs: all annotations of a pod have at most 256 KiB.
const maxRootCAs = 64 << 10

// ReadRootCAs reads RootCAFiles.
func (c *Config) ReadRootCAs() error {
	c.RootCAs = ""
	for _, file := range c.RootCAFiles {
		text, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("rootCAFiles: %w", err)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(text) {
			return fmt.Errorf("rootCAFiles: %s: want certificates in PEM", file)
		}
		c.RootCAs += strings.TrimSpace(string(text)) + "\n"
	}
	if len(c.RootCAs) > maxRootCAs {
		return fmt.Errorf("rootCAFiles: %d bytes of certificates: want at most %d", len(c.RootCAs), maxRootCAs)
	}
	return nil
}

// Check returns an error that names a field with a value that cannot be used.
func (c Config) Check() error {
	_, err := c.withDefaults()
	return err
}

// withDefaults returns the Config with the defaults of empty fields, or an error that names a field
// with a value that cannot be used.
func (c Config) withDefaults() (Config, error) {
	defaults := DefaultConfig()
	c.Mode, c.ImagePullPolicy = cmp.Or(c.Mode, defaults.Mode), cmp.Or(c.ImagePullPolicy, defaults.ImagePullPolicy)
	c.Image, c.InitImage = cmp.Or(c.Image, defaults.Image), cmp.Or(c.InitImage, defaults.InitImage)
	c.RootCert, c.ClusterDomain = cmp.Or(c.RootCert, defaults.RootCert), cmp.Or(c.ClusterDomain, defaults.ClusterDomain)
	if c.IgnoredNamespaces == nil {
		c.IgnoredNamespaces = defaults.IgnoredNamespaces
	}
	c.Resources = c.Resources.withDefaults()
	return c, c.check()
}

// check returns an error with a line for each field with a value that cannot be used.
func (c Config) check() error {
	var errs []error
	if c.Mode != Rules && c.Mode != Resolv {
		errs = append(errs, fmt.Errorf("mode %q: want %s or %s", c.Mode, Rules, Resolv))
	}
	if !slices.Contains([]string{"Always", "IfNotPresent", "Never"}, c.ImagePullPolicy) {
		errs = append(errs, fmt.Errorf("imagePullPolicy %q: want Always, IfNotPresent or Never", c.ImagePullPolicy))
	}
	for _, field := range []struct {
		key    string
		values []string
		want   string
		valid  *regexp.Regexp
		most   int
	}{
		{"image", []string{c.Image}, "the name of an image, such as registry.example.com/nametap:0.1.0", imageName, maxImage},
		{"initImage", []string{c.InitImage}, "the name of an image, such as registry.example.com/nametap-init:0.1.0", imageName, maxImage},
		{"rootCert", []string{c.RootCert}, "the name of a ConfigMap", objectName, maxName},
		{"clusterDomain", []string{c.ClusterDomain}, "a domain, such as cluster.local", domainName, maxName},
		{"clusterID", []string{c.ClusterID}, "a name without control characters", printable, maxName},
		{"ignoredNamespaces", c.IgnoredNamespaces, "the name of a namespace", objectName, maxName},
		{"imagePullSecrets", c.ImagePullSecrets, "the name of a Secret", objectName, maxName},
	} {
		for _, value := range field.values {
			if utf8.RuneCountInString(value) > field.most || !field.valid.MatchString(value) {
				errs = append(errs, fmt.Errorf("%s: %.100q: want %s", field.key, value, field.want))
			}
		}
	}
	if c.Guard != "" && (len(c.Guard) > maxName || !objectName.MatchString(c.Guard)) {
		errs = append(errs, fmt.Errorf("guard: %.100q: want the name of a ConfigMap with the policy in the key %s", c.Guard, policyKey))
	}
	return errors.Join(append(errs, c.checkAddresses(), c.Resources.check(), checkSettings(c.Settings), c.checkEgress())...)
}

// checkEgress returns an error if a setting for connections to VIPs does not work in a pod.
func (c Config) checkEgress() error {
	if c.Guard != "" && c.Mode == Resolv {
		return fmt.Errorf("guard: mode %s has no rules, and without rules a guard is advice: want mode %s", Resolv, Rules)
	}
	if carriesVIPs(c) && c.Mode == Resolv {
		return fmt.Errorf("settings: egress: mode %s has no rules that redirect connections to VIPs: want mode %s", Resolv, Rules)
	}
	if mark, _ := strconv.ParseInt(c.Settings["egress-mark"], 0, 64); mark != 0 {
		return fmt.Errorf("settings: egress-mark: %d: the agent in a pod has no CAP_NET_ADMIN, which marks need: want 0", mark)
	}
	return nil
}

// carriesVIPs reports whether the settings make the agent carry connections to VIPs.
func carriesVIPs(cfg Config) bool {
	on, _ := strconv.ParseBool(cfg.Settings["egress"]) // checkSettings has checked the value
	return on
}

// checkAddresses returns an error if ControlPlane or Nameservers cannot be used.
func (c Config) checkAddresses() error {
	if c.ControlPlane != "" {
		host, port, err := net.SplitHostPort(c.ControlPlane)
		number, err2 := strconv.ParseUint(port, 10, 16)
		valid := len(host) <= maxName && domainName.MatchString(strings.TrimSuffix(host, ".")) // IPv4 addresses, too
		if strings.HasPrefix(c.ControlPlane, "[") {
			addr, _ := netip.ParseAddr(host)
			valid = addr.Is6() && addr.Zone() == ""
		}
		if err != nil || err2 != nil || number == 0 || port[0] == '0' || !valid {
			return fmt.Errorf("controlPlane %.100q: want host:port, for example istiod.istio-system.svc:15012", c.ControlPlane)
		}
	}
	if c.Mode == Resolv && len(c.Nameservers) == 0 {
		return fmt.Errorf("nameservers: mode %s needs the addresses of the cluster's DNS: get them from `kubectl --namespace kube-system get service kube-dns`", Resolv)
	}
	for _, text := range c.Nameservers {
		addr, err := netip.ParseAddr(text)
		if err != nil || addr.Zone() != "" || addr.IsUnspecified() || addr.IsMulticast() {
			return fmt.Errorf("nameservers: %.100q: want an IP address, as the Service of the cluster's DNS has", text)
		}
		if addr.Unmap().IsLoopback() {
			return fmt.Errorf("nameservers: %.100q: the agent itself is on the loopback address of the pod: want the address of the cluster's DNS", text)
		}
	}
	return nil
}

// The annotations of a pod that replace settings. The namespace may have those of the mode and the guard, too.
const (
	modeAnnotation  = "nametap.dev/mode"
	guardAnnotation = "nametap.dev/guard" // Config.Guard, also empty
	cpuRequest      = "nametap.dev/cpu-request"
	cpuLimit        = "nametap.dev/cpu-limit"
	memoryRequest   = "nametap.dev/memory-request"
	memoryLimit     = "nametap.dev/memory-limit"
)

// forPod returns the settings of a pod. Annotations of the pod take precedence over annotations of its namespace, and
// both take precedence over c. forPod sets p.user and p.ambient. An error says why the pod is refused.
func (c Config) forPod(p *pod, ns Namespace) (Config, error) {
	var from []string
	for _, a := range []struct {
		name  string
		value *string
	}{{modeAnnotation, (*string)(&c.Mode)}, {guardAnnotation, &c.Guard}} {
		value, ok := p.Annotations[a.name]
		if !ok {
			value, ok = ns.Annotations[a.name]
		}
		if ok {
			*a.value, from = value, append(from, a.name)
		}
	}
	if err := c.check(); err != nil && len(from) > 0 {
		return c, fmt.Errorf("annotation %s: %w", strings.Join(from, ", "), err)
	}
	var err error
	if p.user, err = agentUser(ns, c.Mode); err != nil {
		return c, err
	}
	settings := maps.Clone(c.Settings)
	if settings == nil {
		settings = map[string]string{}
	}
	if p.ambient = p.isAmbient(ns); p.ambient && c.Mode == Rules && settings["dns-addr"] == "" {
		settings["dns-addr"] = net.JoinHostPort("localhost", strconv.Itoa(besideZtunnel))
	}
	if c.Guard != "" { // without these there would be no guard
		settings["egress"], settings["capture-enabled"] = "true", "true"
	}
	c.Settings = settings
	return c.withAmounts(p.Annotations)
}

// withAmounts returns the settings with the resources in the annotations of a pod.
func (c Config) withAmounts(annotations map[string]string) (Config, error) {
	c.Resources = Resources{maps.Clone(c.Resources.Requests), maps.Clone(c.Resources.Limits)}
	for _, a := range []struct {
		name    string
		amounts Amounts
		key     string
	}{
		{cpuRequest, c.Resources.Requests, "cpu"}, {memoryRequest, c.Resources.Requests, "memory"},
		{cpuLimit, c.Resources.Limits, "cpu"}, {memoryLimit, c.Resources.Limits, "memory"},
	} {
		if text, ok := annotations[a.name]; ok {
			a.amounts[a.key] = text
		}
	}
	if err := c.Resources.check(); err != nil {
		return c, fmt.Errorf("the pod's annotations %s to %s: %w", cpuRequest, memoryLimit, err)
	}
	return c, nil
}

// uidRange is OpenShift's annotation of a namespace with the users that its pods may run as: FIRST/NUMBER, or
// FIRST-LAST.
const uidRange = "openshift.io/sa.scc.uid-range"

// agentUser returns the user of the agent. In a namespace of OpenShift it is the second user of the namespace's range:
// OpenShift admits only users of the range, and runs other containers as the first user.
func agentUser(ns Namespace, mode Mode) (int64, error) {
	text, ok := ns.Annotations[uidRange]
	switch {
	case !ok:
		return agentID, nil
	case mode == Rules:
		return 0, fmt.Errorf("the namespace has the annotation %s, so it is one of OpenShift, which does not permit user %d and the capability NET_ADMIN: use the mode %s, for example by the annotation %s of the namespace", uidRange, agentID, Resolv, modeAnnotation)
	}
	first, rest, block := strings.Cut(text, "/")
	if !block {
		first, rest, _ = strings.Cut(text, "-")
	}
	from, err := strconv.ParseInt(first, 10, 32)
	size, err2 := strconv.ParseInt(rest, 10, 32)
	if !block {
		size -= from - 1
	}
	if err != nil || err2 != nil || from <= 0 || size <= 0 {
		return 0, fmt.Errorf("the namespace has the annotation %s: %.100q: want a range of users, such as 1000650000/10000", uidRange, text)
	}
	return from + min(1, size-1), nil
}
