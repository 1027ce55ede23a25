package inject

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Status is the annotation that lists what was added to a pod, and what it replaced. Its form,
// KEY=VALUE,VALUE;..., is short and easy to read in `kubectl get`.
const Status = "nametap.dev/status"

// A status is the value of the annotation. The zero value is that of a pod without nametap.
type status struct {
	mode             Mode
	initContainers   []string
	volumes          []string
	sysctls          []string
	imagePullSecrets []string
	// generated has the marks of what was generated, of each of initContainers and then of volumes.
	generated []string
	// In mode Resolv, the search list of the cluster that was added, and what the pod itself had.
	clusterSearches []string
	dnsPolicy       string
	dns             corev1.PodDNSConfig
}

// String returns the value of the annotation. Empty lists are left out.
func (s status) String() string {
	parts := []string{"mode=" + string(s.mode)}
	for _, list := range s.lists() {
		if len(*list.values) > 0 {
			parts = append(parts, list.key+"="+strings.Join(*list.values, ","))
		}
	}
	if s.dnsPolicy != "" {
		parts = append(parts, "dnsPolicy="+s.dnsPolicy)
	}
	var options []string
	for _, o := range s.dns.Options {
		options = append(options, optionText(o))
	}
	if len(options) > 0 {
		parts = append(parts, "options="+strings.Join(options, ","))
	}
	return strings.Join(parts, ";")
}

// A statusList is a key whose value is a list.
type statusList struct {
	key    string
	values *[]string
}

// lists returns the lists of a status, in their order.
func (s *status) lists() []statusList {
	return []statusList{
		{"initContainers", &s.initContainers}, {"volumes", &s.volumes}, {"sysctls", &s.sysctls}, {"imagePullSecrets", &s.imagePullSecrets}, {"generated", &s.generated}, {"clusterSearches", &s.clusterSearches},
		{"nameservers", &s.dns.Nameservers}, {"searches", &s.dns.Searches},
	}
}

// parseStatus reads the annotation of a pod. A pod without it has the zero status.
func parseStatus(annotations map[string]string) (status, error) {
	text, ok := annotations[Status]
	if !ok {
		return status{}, nil
	}
	var s status
	seen := map[string]bool{}
	for part := range strings.SplitSeq(text, ";") {
		key, value, _ := strings.Cut(part, "=")
		err := s.parse(key, value)
		if seen[key] {
			err = fmt.Errorf("%s is there twice", key)
		}
		seen[key] = true
		if err != nil {
			return status{}, fmt.Errorf("annotation %s: %.1000q: %w: this version of nametap did not write it; remove it together with what it lists", Status, text, err)
		}
	}
	for _, name := range slices.Concat(s.initContainers, s.volumes) {
		if name != agentName && !strings.HasPrefix(name, agentName+"-") {
			return status{}, fmt.Errorf("annotation %s: %.1000q lists %.1000q, which nametap never adds; remove the annotation together with what nametap has added", Status, text, name)
		}
	}
	if len(s.sysctls) > 0 && !slices.Equal(s.sysctls, []string{lowPorts}) {
		return status{}, fmt.Errorf("annotation %s: %.1000q: want the sysctl %s only", Status, text, lowPorts)
	}
	if s.mode == "" {
		return status{}, fmt.Errorf("annotation %s: %.1000q: want mode=%s or mode=%s", Status, text, Rules, Resolv)
	}
	return s, nil
}

// generatedAt returns the marks of an element, "" if they are not known.
func (s *status) generatedAt(i int) string {
	if i < len(s.generated) {
		return s.generated[i]
	}
	return ""
}

// parse reads one part.
func (s *status) parse(key, value string) error {
	lists := s.lists()
	i := slices.IndexFunc(lists, func(l statusList) bool { return l.key == key })
	switch {
	case value == "":
		return fmt.Errorf("want KEY=VALUE, not %.100q", key)
	case i >= 0:
		*lists[i].values = strings.Split(value, ",")
	case key == "mode" && (Mode(value) == Rules || Mode(value) == Resolv):
		s.mode = Mode(value)
	case key == "dnsPolicy":
		s.dnsPolicy = value
	case key == "options":
		for option := range strings.SplitSeq(value, ",") {
			s.dns.Options = append(s.dns.Options, parseOption(option))
		}
	default:
		return fmt.Errorf("unknown part %s=%s", key, value)
	}
	return nil
}

// optionText returns an option as it is in resolv.conf.
func optionText(o corev1.PodDNSConfigOption) string {
	if o.Value == nil {
		return o.Name
	}
	return o.Name + ":" + *o.Value
}

func parseOption(text string) corev1.PodDNSConfigOption {
	name, value, ok := strings.Cut(text, ":")
	if !ok {
		return corev1.PodDNSConfigOption{Name: name}
	}
	return corev1.PodDNSConfigOption{Name: name, Value: &value}
}

// representable reports whether a status with this configuration can be read again.
func representable(dns corev1.PodDNSConfig) bool {
	original := status{mode: Resolv, dns: dns}
	again, err := parseStatus(map[string]string{Status: original.String()})
	return err == nil && again.String() == original.String() && len(again.dns.Options) == len(dns.Options) &&
		len(again.dns.Searches) == len(dns.Searches) && len(again.dns.Nameservers) == len(dns.Nameservers)
}
