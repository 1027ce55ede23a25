package discovery

import (
	"net/netip"
	"slices"
	"strings"
)

const (
	labelServiceName   = "kubernetes.io/service-name"
	labelAutoAllocate  = "networking.istio.io/enable-autoallocate-ip"
	annotationExportTo = "networking.istio.io/exportTo"
	clusterIPNone      = "None"
	resolutionNone     = "NONE"
	resolutionDynamic  = "DYNAMIC_DNS"
	typeExternalName   = "ExternalName"
	addressTypeFQDN    = "FQDN"
	conditionReady     = "Ready"
	exportToPublic     = "*"
	exportToPrivate    = "."
	exportToNone       = "~"
	podSucceeded       = "Succeeded"
	podFailed          = "Failed"
	maxHostLength      = 253
	maxLabelLength     = 63
	wildcardPrefix     = "*."
	serviceTypeNames   = "ClusterIP, NodePort, LoadBalancer or ExternalName"
)

// decodeKind decodes an object by its kind. Errors are added to the document.
func decodeKind(root field, o *object) {
	switch o.key.kind {
	case kindService:
		o.service = decodeService(root, o.key.namespace)
	case kindEndpointSlice:
		o.slice = decodeSlice(root)
	case kindPod:
		o.pod = decodePod(root)
	case kindServiceEntry:
		o.entry = decodeServiceEntry(root, o.key.namespace)
	}
}

func decodeService(root field, namespace string) *service {
	spec := root.get("spec")
	s := &service{
		selector:        spec.get("selector").stringMap(),
		publishNotReady: spec.get("publishNotReadyAddresses").boolean(false),
	}
	switch t := spec.get("type"); t.str() {
	case "", "ClusterIP", "NodePort", "LoadBalancer":
	case typeExternalName:
		s.externalName = true
	default:
		t.fail("want %s, got %q", serviceTypeNames, t.str())
	}
	// The API server keeps clusterIP equal to the first of clusterIPs. A file may have
	// only one of the two fields.
	for _, f := range append([]field{spec.get("clusterIP")}, spec.get("clusterIPs").list()...) {
		if f.present() && f.str() == clusterIPNone {
			s.headless = true
		} else if a, ok := f.addr(); ok && !slices.Contains(s.clusterIPs, a) {
			s.clusterIPs = append(s.clusterIPs, a)
		}
	}
	if s.headless && len(s.clusterIPs) > 0 {
		spec.get("clusterIP").fail("clusterIP and clusterIPs hold both %s and an address", clusterIPNone)
	}
	if f := root.get("metadata").get("annotations").get(annotationExportTo); f.present() {
		var scopes []string
		for scope := range strings.SplitSeq(f.str(), ",") {
			if scope = strings.TrimSpace(scope); scope != "" {
				scopes = append(scopes, scope)
			}
		}
		s.exportTo = decodeExportTo(f, scopes, namespace)
	}
	return s
}

func decodeSlice(root field) *endpointSlice {
	labels := root.get("metadata").get("labels").stringMap()
	s := &endpointSlice{service: labels[labelServiceName]}
	switch t := root.get("addressType"); t.str() {
	case "", "IPv4", "IPv6":
	case addressTypeFQDN:
		return s // it holds names, not addresses
	default:
		t.fail("want IPv4, IPv6 or FQDN, got %q", t.str())
		return s
	}
	for _, e := range root.get("endpoints").list() {
		ep := endpoint{
			addrs:    e.get("addresses").addrs(),
			ready:    e.get("conditions").get("ready").boolean(true),
			hostname: e.get("hostname").str(),
		}
		if ref := e.get("targetRef"); ref.get("kind").str() == kindPod {
			ep.pod = ref.get("name").str()
		}
		if ep.hostname != "" && !isLabel(ep.hostname) {
			e.get("hostname").fail("want a DNS label, got %q", ep.hostname)
		}
		s.endpoints = append(s.endpoints, ep)
	}
	return s
}

func decodePod(root field) *pod {
	meta, spec, status := root.get("metadata"), root.get("spec"), root.get("status")
	p := &pod{
		labels:    meta.get("labels").stringMap(),
		hostname:  spec.get("hostname").str(),
		subdomain: spec.get("subdomain").str(),
	}
	switch status.get("phase").str() {
	case podSucceeded, podFailed:
		p.terminated = true
	}
	p.terminated = p.terminated || meta.get("deletionTimestamp").present()
	if a, ok := status.get("podIP").addr(); ok {
		p.addrs = append(p.addrs, a)
	}
	for _, f := range status.get("podIPs").list() {
		if a, ok := f.get("ip").addr(); ok && !slices.Contains(p.addrs, a) {
			p.addrs = append(p.addrs, a)
		}
	}
	for _, c := range status.get("conditions").list() {
		if c.get("type").str() == conditionReady {
			p.ready = c.get("status").str() == "True"
		}
	}
	if p.hostname != "" && !isLabel(p.hostname) {
		spec.get("hostname").fail("want a DNS label, got %q", p.hostname)
	}
	return p
}

func decodeServiceEntry(root field, namespace string) *serviceEntry {
	meta, spec := root.get("metadata"), root.get("spec")
	e := &serviceEntry{
		noVIP: strings.EqualFold(meta.get("labels").stringMap()[labelAutoAllocate], "false"),
	}
	for _, f := range spec.get("hosts").list() {
		host := strings.TrimSuffix(f.str(), ".")
		if f.isString() && !isHost(host) {
			f.fail("want a DNS name or *.suffix, got %q", f.str())
		}
		e.hosts = append(e.hosts, host)
	}
	if len(e.hosts) == 0 {
		spec.doc.fail(spec.line(), joinPath(spec.path, "hosts"), "is missing: a ServiceEntry needs at least one host")
	}
	for _, f := range spec.get("addresses").list() {
		e.hasAddresses = true
		if a, ok := decodeAddress(f); ok {
			e.addrs = append(e.addrs, a)
		}
	}
	switch r := spec.get("resolution"); r.str() {
	case "":
		e.resolution = resolutionNone
	case resolutionNone, "STATIC", "DNS", "DNS_ROUND_ROBIN", resolutionDynamic:
		e.resolution = r.str()
	default:
		r.fail("want NONE, STATIC, DNS, DNS_ROUND_ROBIN or DYNAMIC_DNS, got %q", r.str())
	}
	var scopes []string
	for _, f := range spec.get("exportTo").list() {
		scopes = append(scopes, f.str())
	}
	e.exportTo = decodeExportTo(spec.get("exportTo"), scopes, namespace)
	return e
}

// decodeAddress decodes an address of a ServiceEntry. A CIDR with one address is that
// address. A wider one is valid but gives no address, because a client cannot connect to
// a network.
func decodeAddress(f field) (netip.Addr, bool) {
	s := f.str()
	if p, err := netip.ParsePrefix(s); err == nil {
		if !p.IsSingleIP() {
			return netip.Addr{}, false
		}
		return p.Addr().Unmap(), true
	}
	if strings.Contains(s, "/") {
		f.fail("want an IP address or a CIDR, got %q", s)
		return netip.Addr{}, false
	}
	return f.addr()
}

// decodeExportTo decodes the namespaces that see a host: "*", or no entry at all, means
// all namespaces, "." the object's own, "~" none; other entries are names.
func decodeExportTo(f field, scopes []string, namespace string) exportTo {
	if len(scopes) == 0 || slices.Contains(scopes, exportToPublic) {
		return exportTo{}
	}
	e := exportTo{restricted: true}
	for _, scope := range scopes {
		switch {
		case scope == exportToPrivate:
			e.namespaces = append(e.namespaces, namespace)
		case scope == exportToNone && len(scopes) == 1:
		case isLabel(scope):
			e.namespaces = append(e.namespaces, scope)
		default:
			f.fail(`want namespaces, ".", "*" or "~" alone, got %q`, scope)
		}
	}
	slices.Sort(e.namespaces)
	e.namespaces = slices.Compact(e.namespaces)
	return e
}

// isHost reports whether s is a DNS name, with or without a leading "*.".
func isHost(s string) bool {
	s = strings.TrimPrefix(s, wildcardPrefix)
	if s == "" || len(s) > maxHostLength {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return false
		}
	}
	return true
}

// isLabel reports whether s is a label of a DNS name. Underscores are not valid in host
// names, but they are in use, so isLabel allows them.
func isLabel(s string) bool {
	if s == "" || len(s) > maxLabelLength || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}
