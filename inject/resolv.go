package inject

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
)

// dnsFields are the fields of a pod from which kubelet makes the pod's resolv.conf. An empty field is removed from the pod.
type dnsFields struct {
	policy string
	config corev1.PodDNSConfig
}

// configOrNone returns the configuration, nil if it is empty.
func (f dnsFields) configOrNone() *corev1.PodDNSConfig {
	if len(f.config.Nameservers)+len(f.config.Searches)+len(f.config.Options) == 0 {
		return nil
	}
	return &f.config
}

// ownDNS returns the DNS fields that the pod would have without an injection in mode Resolv: the fields before the
// first injection, with the changes that others have made since then. A nameserver that others have removed stays,
// because the injected pod has no other nameserver than the agent, and so does not show the removal.
func ownDNS(p *pod, previous status) dnsFields {
	current := dnsFields{policy: string(p.Spec.DNSPolicy)}
	if p.Spec.DNSConfig != nil {
		current.config = *p.Spec.DNSConfig
	}
	if previous.Mode != Resolv {
		return current
	}
	policy := current.policy
	if policy == "None" {
		policy = previous.DNSPolicy
	}
	var original corev1.PodDNSConfig
	if previous.DNSConfig != nil {
		original = *previous.DNSConfig
	}
	var injectedOptions []string
	if previous.DNSPolicy != "None" && !slices.ContainsFunc(original.Options, isNdots) {
		injectedOptions = []string{optionText(clusterNdots())}
	}
	text := func(s string) string { return s }
	return dnsFields{policy, corev1.PodDNSConfig{
		Nameservers: edited(original.Nameservers, slices.Concat(original.Nameservers, current.config.Nameservers), []string{loopback}, text),
		Searches:    edited(original.Searches, current.config.Searches, previous.ClusterSearches, text),
		Options:     edited(original.Options, current.config.Options, injectedOptions, optionText),
	}}
}

// edited returns a list with the changes that other programs have made since an injection. The parameter original is
// the list before the injection, current is the list in the pod, and injected has the elements that the injection
// added. The result has the elements of original that are still in current, and then the elements of current that are
// neither in original nor in injected.
func edited[T any](original, current []T, injected []string, text func(T) string) []T {
	present, known := map[string]bool{}, map[string]bool{}
	for _, v := range current {
		present[text(v)] = true
	}
	var list []T
	for _, v := range original {
		known[text(v)] = true
		if present[text(v)] {
			list = append(list, v)
		}
	}
	for _, s := range injected {
		known[s] = true
	}
	for _, v := range current {
		if !known[text(v)] {
			list = append(list, v)
		}
	}
	return list
}

// clusterNdots is the option that kubelet writes for the DNS of the cluster.
func clusterNdots() corev1.PodDNSConfigOption {
	five := "5"
	return corev1.PodDNSConfigOption{Name: "ndots", Value: &five}
}

func isNdots(o corev1.PodDNSConfigOption) bool {
	name, _, _ := strings.Cut(o.Name, ":")
	return name == "ndots"
}

// optionText returns an option as it is in resolv.conf.
func optionText(o corev1.PodDNSConfigOption) string {
	if o.Value == nil {
		return o.Name
	}
	return o.Name + ":" + *o.Value
}

// A resolvConf is the DNS of a pod in mode Resolv.
type resolvConf struct {
	fields          dnsFields
	clusterSearches []string
	upstreams       []string // the nameservers that the agent forwards to
}

// newResolvConf returns the DNS of a pod whose only nameserver is the agent. The search list and the options are the ones
// that kubelet would write, without the search list of the node.
func newResolvConf(podDNS dnsFields, ns Namespace, cfg Config) (resolvConf, error) {
	for _, nameserver := range podDNS.config.Nameservers {
		if !canForward(nameserver) {
			return resolvConf{}, fmt.Errorf("dnsConfig has the nameserver %.100q, to which the agent cannot forward, because it is no address of another host: remove it, or use the mode %s", nameserver, Rules)
		}
	}
	upstreams, options := podDNS.config.Nameservers, slices.Clone(podDNS.config.Options)
	var clusterSearches []string
	switch podDNS.policy {
	case "", "ClusterFirst", "ClusterFirstWithHostNet":
		if !objectName.MatchString(ns.Name) {
			return resolvConf{}, fmt.Errorf("namespace %.100q: want the name of a namespace, for the search list", ns.Name)
		}
		services := "svc." + cfg.ClusterDomain
		upstreams = slices.Concat(cfg.Nameservers, upstreams)
		clusterSearches = []string{ns.Name + "." + services, services, cfg.ClusterDomain}
		if !slices.ContainsFunc(options, isNdots) {
			options = slices.Insert(options, 0, clusterNdots())
		}
	case "None":
		if len(upstreams) == 0 {
			return resolvConf{}, errors.New("dnsPolicy is None and dnsConfig has no nameservers: add one")
		}
	default:
		return resolvConf{}, fmt.Errorf("dnsPolicy is %s, so the pod has the node's nameservers, which mode %s does not know: set another policy, or use the mode %s", podDNS.policy, Resolv, Rules)
	}
	config := corev1.PodDNSConfig{Nameservers: []string{loopback}, Searches: distinct(slices.Concat(clusterSearches, podDNS.config.Searches)), Options: options}
	if len(config.Searches) > maxSearches || utf8.RuneCountInString(strings.Join(config.Searches, " ")) > maxSearchList {
		return resolvConf{}, fmt.Errorf("the search lists of the cluster and of dnsConfig together have more than %d domains or %d characters: remove some, or use the mode %s", maxSearches, maxSearchList, Rules)
	}
	return resolvConf{dnsFields{"None", config}, clusterSearches, distinct(upstreams)}, nil
}

// canForward reports whether the agent can forward to a nameserver of a pod. Injection takes these nameservers out of
// dnsConfig, so the API server does not check them.
func canForward(nameserver string) bool {
	addr, err := netip.ParseAddr(nameserver)
	return err == nil && addr.Zone() == "" && !addr.Is4In6() && (addr.IsGlobalUnicast() || addr.IsLinkLocalUnicast())
}

// The limits of the API server for the search list of a pod.
const (
	maxSearches   = 32
	maxSearchList = 2048 // characters, with spaces between
)

// distinct returns the list without repetitions, as kubelet does with search domains.
func distinct(list []string) []string {
	var result []string
	for _, s := range list {
		if !slices.Contains(result, s) {
			result = append(result, s)
		}
	}
	return result
}

// missingSysctls returns the sysctls that a pod needs for an agent on port 53.
func missingSysctls(p *pod, previous status) ([]corev1.Sysctl, error) {
	missing := []corev1.Sysctl{{Name: lowPorts, Value: strconv.Itoa(plainDNS)}}
	if p.Spec.SecurityContext == nil {
		return missing, nil
	}
	for _, s := range p.Spec.SecurityContext.Sysctls {
		if strings.ReplaceAll(s.Name, "/", ".") != lowPorts || slices.Contains(previous.Sysctls, s.Name) {
			continue
		}
		if first, err := strconv.ParseUint(s.Value, 10, 16); err != nil || first > plainDNS {
			return nil, fmt.Errorf("the pod sets the sysctl %s to %.100q, and the agent needs %d or less: change it, or use the mode %s", lowPorts, s.Value, plainDNS, Rules)
		}
		missing = nil
	}
	return missing, nil
}
