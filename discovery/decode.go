package discovery

import (
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

const (
	typeExternalName = "ExternalName"
	addressTypeFQDN  = "FQDN"
	conditionReady   = "Ready"
	podSucceeded     = "Succeeded"
	podFailed        = "Failed"
	serviceTypeNames = "ClusterIP, NodePort, LoadBalancer or ExternalName"
)

// decodeKind decodes an object by its kind. Errors are added to the document.
func decodeKind(root field, o *object.Object) {
	switch o.Key.Kind {
	case object.KindService:
		o.Service = decodeService(root, o.Key.Namespace)
	case object.KindEndpointSlice:
		o.Slice = decodeSlice(root)
	case object.KindPod:
		o.Pod = decodePod(root)
	case object.KindServiceEntry:
		o.Entry = decodeServiceEntry(root, o.Key.Namespace)
	case object.KindSidecar:
		o.Sidecar = decodeSidecar(root)
	case object.KindServiceImport:
		o.Import = decodeImport(root)
	}
}

func decodeService(root field, namespace string) *object.Service {
	spec := root.get("spec")
	s := &object.Service{
		Selector:        spec.get("selector").stringMap(),
		PublishNotReady: spec.get("publishNotReadyAddresses").boolean(false),
	}
	switch t := spec.get("type"); t.str() {
	case "", "ClusterIP", "NodePort", "LoadBalancer":
	case typeExternalName:
		s.ExternalName = decodeExternalName(spec.get("externalName"))
	default:
		t.fail("want %s, got %q", serviceTypeNames, t.str())
	}
	// The API server keeps clusterIP equal to the first of clusterIPs. A file may have
	// only one of the two fields.
	for _, f := range append([]field{spec.get("clusterIP")}, spec.get("clusterIPs").list()...) {
		if f.present() && f.str() == object.ClusterIPNone {
			s.Headless = true
		} else if a, ok := f.addr(); ok && !slices.Contains(s.ClusterIPs, a) {
			s.ClusterIPs = append(s.ClusterIPs, a)
		}
	}
	if s.Headless && len(s.ClusterIPs) > 0 {
		spec.get("clusterIP").fail("clusterIP and clusterIPs hold both %s and an address", object.ClusterIPNone)
	}
	s.Ports = decodePorts(spec.get("ports"), s.Headless)
	if f := root.get("metadata").get("annotations").get(object.AnnotationScope); f.present() {
		if err := s.HeadlessScope.UnmarshalText([]byte(f.str())); err != nil {
			f.fail("%v", err)
		}
	}
	if f := root.get("metadata").get("annotations").get(object.AnnotationExportTo); f.present() {
		var err error
		if s.ExportTo, err = object.ParseExportTo(f.str(), namespace); err != nil {
			f.fail("%v", err)
		}
	}
	return s
}

// decodePorts returns the ports of a Service or an EndpointSlice. With targets, the number of a port is
// that of its targetPort, and one whose targetPort is a name is left out. So is one without a number: in
// an EndpointSlice it stands for all ports.
func decodePorts(f field, targets bool) object.Ports {
	var ports []object.Port
	names := map[string]bool{}
	for _, e := range f.list() {
		name, number := e.get("name"), e.get("port")
		p := object.Port{Name: name.str(), Number: number.port()}
		switch {
		case p.Name != "" && !object.IsLabel(p.Name):
			name.fail("want a DNS label, got %q", p.Name)
		case names[p.Name]:
			e.fail("want a name that no other port has, got %q", p.Name)
		}
		names[p.Name] = true
		var err error
		if p.Protocol, err = object.ParseProtocol(e.get("protocol").str()); err != nil {
			e.get("protocol").fail("%v", err)
		}
		if target := e.get("targetPort"); targets && target.isString() {
			continue
		} else if targets && target.present() {
			p.Number = target.port()
		}
		if p.Number != 0 {
			ports = append(ports, p)
		}
	}
	return object.NewPorts(ports)
}

// decodeExternalName returns the host that a Service of type ExternalName stands for. Kubernetes
// allows a trailing dot.
func decodeExternalName(f field) string {
	host := strings.TrimSuffix(f.str(), ".")
	if !object.IsHost(host) || object.IsWildcard(host) {
		f.fail("want a DNS name, got %q", f.str())
	}
	return host
}

func decodeSlice(root field) *object.EndpointSlice {
	labels := root.get("metadata").get("labels").stringMap()
	s := &object.EndpointSlice{Service: labels[object.LabelServiceName], Import: object.NewImportedSlice(labels)}
	switch t := root.get("addressType"); t.str() {
	case "", "IPv4", "IPv6":
	case addressTypeFQDN:
		return s // it holds names, not addresses
	default:
		t.fail("want IPv4, IPv6 or FQDN, got %q", t.str())
		return s
	}
	s.Ports = decodePorts(root.get("ports"), false)
	for _, e := range root.get("endpoints").list() {
		ep := object.Endpoint{
			Addrs:    e.get("addresses").addrs(),
			Ready:    e.get("conditions").get("ready").boolean(true),
			Hostname: e.get("hostname").str(),
		}
		if ref := e.get("targetRef"); ref.get("kind").str() == object.KindPod {
			ep.Pod = ref.get("name").str()
		}
		if ep.Hostname != "" && !object.IsLabel(ep.Hostname) {
			e.get("hostname").fail("want a DNS label, got %q", ep.Hostname)
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

func decodeImport(root field) *object.ServiceImport {
	spec := root.get("spec")
	s := &object.ServiceImport{IPs: spec.get("ips").addrs(), Ports: decodePorts(spec.get("ports"), false)}
	switch t := spec.get("type"); t.str() {
	case object.ImportClusterSetIP:
	case object.ImportHeadless:
		s.Headless = true
	default:
		t.fail("want %s or %s, got %q", object.ImportClusterSetIP, object.ImportHeadless, t.str())
	}
	return s
}

func decodePod(root field) *object.Pod {
	meta, spec, status := root.get("metadata"), root.get("spec"), root.get("status")
	p := &object.Pod{
		Labels:    meta.get("labels").stringMap(),
		Hostname:  spec.get("hostname").str(),
		Subdomain: spec.get("subdomain").str(),
	}
	switch status.get("phase").str() {
	case podSucceeded, podFailed:
		p.Terminated = true
	}
	p.Terminated = p.Terminated || meta.get("deletionTimestamp").present()
	if a, ok := status.get("podIP").addr(); ok {
		p.Addrs = append(p.Addrs, a)
	}
	for _, f := range status.get("podIPs").list() {
		if a, ok := f.get("ip").addr(); ok && !slices.Contains(p.Addrs, a) {
			p.Addrs = append(p.Addrs, a)
		}
	}
	for _, c := range status.get("conditions").list() {
		if c.get("type").str() == conditionReady {
			p.Ready = c.get("status").str() == "True"
		}
	}
	if p.Hostname != "" && !object.IsLabel(p.Hostname) {
		spec.get("hostname").fail("want a DNS label, got %q", p.Hostname)
	}
	return p
}

func decodeServiceEntry(root field, namespace string) *object.ServiceEntry {
	meta, spec := root.get("metadata"), root.get("spec")
	e := &object.ServiceEntry{
		NoVIP: strings.EqualFold(meta.get("labels").stringMap()[object.LabelAutoAllocate], "false"),
	}
	for _, f := range spec.get("hosts").list() {
		host := strings.TrimSuffix(f.str(), ".")
		if f.isString() && !object.IsHost(host) {
			f.fail("want a DNS name or *.suffix, got %q", f.str())
		}
		e.Hosts = append(e.Hosts, host)
	}
	if len(e.Hosts) == 0 {
		spec.doc.fail(spec.line(), joinPath(spec.path, "hosts"), "is missing: a ServiceEntry needs at least one host")
	}
	for _, f := range spec.get("addresses").list() {
		e.HasAddresses = true
		a, err := object.ParseAddress(f.str())
		if err != nil && f.isString() {
			f.fail("%v", err)
		}
		if a.IsValid() {
			e.Addrs = append(e.Addrs, a)
		}
	}
	switch r := spec.get("resolution"); r.str() {
	case "":
		e.Resolution = object.ResolutionNone
	case object.ResolutionNone, object.ResolutionStatic, object.ResolutionDNS, object.ResolutionRoundRobin, object.ResolutionDynamic:
		e.Resolution = r.str()
	default:
		r.fail("want NONE, STATIC, DNS, DNS_ROUND_ROBIN or DYNAMIC_DNS, got %q", r.str())
	}
	e.Destinations = object.NewDestinations(e.Resolution, decodeEntryPorts(spec.get("ports")), decodeEndpoints(spec.get("endpoints")))
	for _, f := range root.get("status").get("addresses").list() {
		if a, ok := f.get("value").addr(); ok {
			e.AddVIP(f.get("host").str(), a)
		}
	}
	var scopes []string
	for _, f := range spec.get("exportTo").list() {
		scopes = append(scopes, f.str())
	}
	var err error
	if e.ExportTo, err = object.NewExportTo(scopes, namespace); err != nil {
		spec.get("exportTo").fail("%v", err)
	}
	return e
}

// decodeEntryPorts returns the ports of a ServiceEntry.
func decodeEntryPorts(f field) []object.EntryPort {
	var ports []object.EntryPort
	names := map[string]bool{}
	for _, e := range f.list() {
		name := e.get("name")
		p := object.EntryPort{
			Name: name.str(), Protocol: e.get("protocol").str(), Number: e.get("number").port(), Target: e.get("targetPort").port(),
		}
		if p.Name != "" && names[p.Name] {
			name.fail("want a name that no other port has, got %q", p.Name)
		}
		names[p.Name] = true
		ports = append(ports, p)
	}
	return ports
}

// decodeEndpoints returns the endpoints of a ServiceEntry that have an address of a network.
func decodeEndpoints(f field) []object.EntryEndpoint {
	var endpoints []object.EntryEndpoint
	for _, e := range f.list() {
		address := e.get("address")
		endpoint := object.EntryEndpoint{Ports: e.get("ports").portMap()}
		text := address.str()
		if text == "" || object.IsSocket(text) {
			continue
		}
		var err error
		if endpoint.Address, err = object.ParseEndpoint(text); err != nil {
			address.fail("%v", err)
			continue
		}
		endpoints = append(endpoints, endpoint)
	}
	return endpoints
}

func decodeSidecar(root field) *object.Sidecar {
	spec := root.get("spec")
	s := &object.Sidecar{Labels: spec.get("workloadSelector").get("labels").stringMap()}
	for _, listener := range spec.get("egress").list() {
		if s.Egress == nil {
			s.Egress = []object.EgressHost{}
		}
		for _, f := range listener.get("hosts").list() {
			h, ok, err := object.ParseEgressHost(f.str())
			if err != nil && f.isString() {
				f.fail("%v", err)
			}
			if ok {
				s.Egress = append(s.Egress, h)
			}
		}
	}
	return s
}
