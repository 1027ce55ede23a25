package decode

import (
	"maps"
	"slices"
	"strings"
	"time"

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

// Decode decodes root, which is an object of the kind in o.Key, into o. Errors go to the report of root. Invalid parts
// are left out. A broken object never shows a host to more clients than its author wanted.
func Decode(root Field, o *object.Object) {
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
		if host := object.ImportHost(o.Key); !object.IsHost(host) {
			root.Member("metadata").Member("name").Fail("makes the host %q, which is no DNS name", host)
		}
	}
}

func decodeService(root Field, namespace string) *object.Service {
	spec := root.Member("spec")
	s := &object.Service{
		Selector:        spec.Member("selector").texts(),
		PublishNotReady: spec.Member("publishNotReadyAddresses").boolean(false),
	}
	switch t := spec.Member("type"); t.Text() {
	case "", "ClusterIP", "NodePort", "LoadBalancer":
	case typeExternalName:
		s.ExternalName = decodeExternalName(spec.Member("externalName"))
	default:
		t.Fail("want %s, got %q", serviceTypeNames, t.Text())
	}
	// The API server keeps clusterIP equal to the first of clusterIPs. A file may have
	// only one of the two fields.
	for _, f := range append([]Field{spec.Member("clusterIP")}, spec.Member("clusterIPs").Elements()...) {
		if f.IsString() && f.Text() == object.ClusterIPNone {
			s.Headless = true
		} else if a, ok := f.addr(); ok && !slices.Contains(s.ClusterIPs, a) {
			s.ClusterIPs = append(s.ClusterIPs, a)
		}
	}
	if s.Headless && len(s.ClusterIPs) > 0 {
		spec.Member("clusterIP").Fail("clusterIP and clusterIPs hold both %s and an address", object.ClusterIPNone)
	}
	s.Ports, s.Numbers = decodePorts(spec.Member("ports"), s.Headless)
	annotations := root.Member("metadata").Member("annotations")
	if f := annotations.Member(object.AnnotationScope); f.Present() {
		if err := s.HeadlessScope.UnmarshalText([]byte(f.Text())); err != nil {
			f.Fail("%v", err)
		}
	}
	if f := annotations.Member(object.AnnotationExportTo); f.Present() {
		s.ExportTo = f.exportTo(object.SplitScopes(f.Text()), namespace)
	}
	return s
}

// decodePorts returns the ports of a Service or an EndpointSlice, and their numbers. If targets is true, a port gets the
// number of its targetPort, and a port whose targetPort is a name is left out. A port without a
// number is left out, too: in an EndpointSlice it stands for all ports.
func decodePorts(f Field, targets bool) (all object.Ports, numbers []uint16) {
	var ports []object.Port
	names := map[string]bool{}
	for _, e := range f.Elements() {
		name, number := e.Member("name"), e.Member("port")
		p := object.Port{Name: name.Text(), Number: number.port()}
		protocol := e.Member("protocol")
		var err error
		p.Protocol, err = object.ParseProtocol(protocol.Text())
		switch {
		case p.Name != "" && !object.IsLabel(p.Name):
			name.Fail("want a DNS label, got %q", p.Name)
			continue
		case names[p.Name]:
			e.Fail("want a name that no other port has, got %q", p.Name)
			continue
		case err != nil:
			protocol.Fail("%v", err)
			continue
		}
		names[p.Name], numbers = true, append(numbers, p.Number)
		if target := e.Member("targetPort"); targets && target.IsString() {
			continue
		} else if targets && target.Present() {
			p.Number = target.port()
		}
		if p.Number != 0 {
			ports = append(ports, p)
		}
	}
	return object.NewPorts(ports), numbers
}

// decodeExternalName returns the host that a Service of type ExternalName stands for. Kubernetes
// allows a trailing dot.
func decodeExternalName(f Field) string {
	host := strings.TrimSuffix(f.Text(), ".")
	if !object.IsHost(host) || object.IsWildcard(host) {
		f.Fail("want a DNS name, got %q", f.Text())
		return ""
	}
	return host
}

func decodeSlice(root Field) *object.EndpointSlice {
	labels := root.Member("metadata").Member("labels").texts()
	s := &object.EndpointSlice{Service: labels[object.LabelServiceName], Import: object.NewImportedSlice(labels)}
	switch t := root.Member("addressType"); t.Text() {
	case "", "IPv4", "IPv6":
	case addressTypeFQDN:
		return s // the slice holds names, not addresses
	default:
		t.Fail("want IPv4, IPv6 or FQDN, got %q", t.Text())
		return s
	}
	s.Ports, _ = decodePorts(root.Member("ports"), false)
	for _, e := range root.Member("endpoints").Elements() {
		ep := object.Endpoint{
			Addrs:    e.Member("addresses").addrs(),
			Ready:    e.Member("conditions").Member("ready").boolean(true),
			Hostname: e.Member("hostname").Text(),
		}
		if ref := e.Member("targetRef"); ref.Member("kind").Text() == object.KindPod {
			ep.Pod = ref.Member("name").Text()
		}
		if ep.Hostname != "" && !object.IsLabel(ep.Hostname) {
			e.Member("hostname").Fail("want a DNS label, got %q", ep.Hostname)
			ep.Hostname = ""
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
	return s
}

func decodeImport(root Field) *object.ServiceImport {
	spec := root.Member("spec")
	s := &object.ServiceImport{IPs: spec.Member("ips").addrs()}
	s.Ports, s.Numbers = decodePorts(spec.Member("ports"), false)
	switch t := spec.Member("type"); t.Text() {
	case object.ImportClusterSetIP:
	case object.ImportHeadless:
		s.Headless = true
	default:
		t.Fail("want %s or %s, got %q", object.ImportClusterSetIP, object.ImportHeadless, t.Text())
	}
	return s
}

func decodePod(root Field) *object.Pod {
	meta, spec, status := root.Member("metadata"), root.Member("spec"), root.Member("status")
	p := &object.Pod{
		Labels:    meta.Member("labels").texts(),
		Hostname:  spec.Member("hostname").Text(),
		Subdomain: spec.Member("subdomain").Text(),
	}
	switch status.Member("phase").Text() {
	case podSucceeded, podFailed:
		p.Terminated = true
	}
	p.Terminated = p.Terminated || meta.Member("deletionTimestamp").Present()
	if a, ok := status.Member("podIP").addr(); ok {
		p.Addrs = append(p.Addrs, a)
	}
	for _, f := range status.Member("podIPs").Elements() {
		if a, ok := f.Member("ip").addr(); ok && !slices.Contains(p.Addrs, a) {
			p.Addrs = append(p.Addrs, a)
		}
	}
	for _, c := range status.Member("conditions").Elements() {
		if c.Member("type").Text() == conditionReady {
			p.Ready = c.Member("status").Text() == "True"
		}
	}
	if p.Hostname != "" && !object.IsLabel(p.Hostname) {
		spec.Member("hostname").Fail("want a DNS label, got %q", p.Hostname)
		p.Hostname = ""
	}
	return p
}

func decodeServiceEntry(root Field, namespace string) *object.ServiceEntry {
	meta, spec := root.Member("metadata"), root.Member("spec")
	e := &object.ServiceEntry{
		NoVIP:   strings.EqualFold(meta.Member("labels").texts()[object.LabelAutoAllocate], "false"),
		Created: created(meta),
	}
	for _, f := range spec.Member("hosts").Elements() {
		host := strings.TrimSuffix(f.Text(), ".")
		switch {
		case object.IsHost(host):
			e.Hosts = append(e.Hosts, host)
		case f.IsString():
			f.Fail("want a DNS name or *.suffix, got %q", f.Text())
		}
	}
	if len(spec.Member("hosts").Elements()) == 0 {
		spec.Missing("hosts", ": a ServiceEntry needs at least one host")
	}
	for _, f := range spec.Member("addresses").Elements() {
		a, err := object.ParseAddress(f.Text())
		if object.IsVIP(a) { // otherwise the author could choose the VIP of another namespace's host
			f.Fail("is left out: %s is in the range of automatic VIPs, which no author chooses", a)
			continue
		}
		e.HasAddresses = true
		if err != nil && f.IsString() {
			f.Fail("%v", err)
		}
		if a.IsValid() {
			e.Addrs = append(e.Addrs, a)
		}
	}
	e.Resolution = object.ResolutionNone
	switch r := spec.Member("resolution"); r.Text() {
	case "":
	case object.ResolutionNone, object.ResolutionStatic, object.ResolutionDNS, object.ResolutionRoundRobin, object.ResolutionDynamic:
		e.Resolution = r.Text()
	default:
		r.Fail("want NONE, STATIC, DNS, DNS_ROUND_ROBIN or DYNAMIC_DNS, got %q", r.Text())
	}
	if e.Resolution == object.ResolutionNone {
		e.Selector = spec.Member("workloadSelector").Member("labels").texts()
	}
	ports, endpoints := decodeEntryPorts(spec.Member("ports")), decodeEndpoints(spec.Member("endpoints"))
	for _, p := range ports {
		e.Numbers = append(e.Numbers, p.Number)
	}
	if size := sizeInTables(e, ports, endpoints); size > object.MaxInTables {
		spec.Fail("its hosts have %d KiB in tables: %d hosts, each with %d addresses and with %d ports of %d endpoints; want at most %d KiB, use several objects",
			size>>10, len(e.Hosts), len(e.Addrs), len(ports), len(endpoints), object.MaxInTables>>10)
		e.Hosts = nil
	} else {
		e.Destinations = object.NewDestinations(e.Resolution, ports, endpoints)
		addVIPs(root, e)
	}
	var scopes []string
	exportTo := spec.Member("exportTo")
	for _, f := range exportTo.Elements() {
		scopes = append(scopes, f.Text())
	}
	e.ExportTo = exportTo.exportTo(scopes, namespace)
	return e
}

// sizeInTables returns about how many bytes the hosts of a ServiceEntry have in tables.
func sizeInTables(e *object.ServiceEntry, ports []object.EntryPort, endpoints []object.EntryEndpoint) int {
	const address, port = 40, 16 // of each
	size := port
	for _, one := range endpoints {
		size += port + len(one.Address)
	}
	return len(e.Hosts) * (address*len(e.Addrs) + size*len(ports))
}

// addVIPs adds the VIPs in the status of a ServiceEntry. An invalid VIP in the status is ignored without an error,
// because the object's author does not write the status.
func addVIPs(root Field, e *object.ServiceEntry) {
	status := root.WithReport(func(Field, string) {}).Member("status").Member("addresses")
	var vips []object.VIP
	for _, f := range status.Elements() {
		if a, valid := f.Member("value").addr(); valid {
			vips = append(vips, object.VIP{Host: f.Member("host").Text(), Addr: a})
		}
	}
	if len(vips) > 0 {
		e.SetVIPs(vips...)
	}
}

// decodeEntryPorts returns the ports of a ServiceEntry.
func decodeEntryPorts(f Field) []object.EntryPort {
	var ports []object.EntryPort
	names := map[string]bool{}
	for _, e := range f.Elements() {
		name := e.Member("name")
		p := object.EntryPort{
			Name: name.Text(), Protocol: e.Member("protocol").Text(), Number: e.Member("number").port(), Target: e.Member("targetPort").port(),
		}
		if p.Name != "" && names[p.Name] {
			name.Fail("want a name that no other port has, got %q", p.Name)
			continue
		}
		names[p.Name] = true
		ports = append(ports, p)
	}
	return ports
}

// decodeEndpoints returns the endpoints of a ServiceEntry, without Unix sockets.
func decodeEndpoints(f Field) []object.EntryEndpoint {
	var endpoints []object.EntryEndpoint
	for _, e := range f.Elements() {
		address := e.Member("address")
		endpoint := object.EntryEndpoint{Ports: e.Member("ports").ports()}
		text := address.Text()
		if text == "" || object.IsSocket(text) {
			continue
		}
		var err error
		if endpoint.Address, err = object.ParseEndpoint(text); err != nil {
			address.Fail("%v", err)
			continue
		}
		endpoints = append(endpoints, endpoint)
	}
	return endpoints
}

// created returns when an object with the given metadata was created; the zero time if that is not known.
func created(meta Field) time.Time {
	at, err := time.Parse(time.RFC3339, meta.Member("creationTimestamp").Text())
	if err != nil {
		return time.Time{}
	}
	return at
}

func decodeSidecar(root Field) *object.Sidecar {
	spec := root.Member("spec")
	s := &object.Sidecar{Labels: spec.Member("workloadSelector").Member("labels").texts(), Created: created(root.Member("metadata"))}
	egress := spec.Member("egress")
	if egress.Present() && !egress.isEmpty() {
		s.Egress = []object.EgressListener{}
	}
	for _, f := range egress.Elements() {
		if l, understood := decodeListener(f); understood {
			s.Egress = append(s.Egress, l)
		} else {
			f.Fail("is not understood: the listener shows no host")
		}
	}
	return s
}

// decodeListener decodes an egress listener. understood is false if a part that limits its hosts is not: without that
// part, the listener would show more hosts than its author wanted. A host that is not understood is left out.
func decodeListener(f Field) (l object.EgressListener, understood bool) {
	understood = true
	for _, name := range slices.Sorted(maps.Keys(f.members())) {
		switch name {
		case "hosts", "port", "bind", "captureMode":
		default:
			f.Member(name).Fail("is not known")
			understood = false
		}
	}
	// As in istiod, a listener that is an HTTP proxy, or has no number, shows hosts with any port.
	port := f.Member("port")
	if number := port.Member("number"); strings.EqualFold(port.Member("protocol").Text(), "HTTP_PROXY") {
		l.Port = object.ProxyPort
	} else if number.Present() && number.Value.Text() != "0" {
		l.Port = int(number.port())
		understood = understood && l.Port != 0
	}
	for _, e := range f.Member("hosts").Elements() {
		h, err := object.ParseEgressHost(e.Text())
		switch {
		case err == nil:
			l.Hosts = append(l.Hosts, h)
		case e.IsString():
			e.Fail("%v", err)
			understood = understood && !strings.HasPrefix(e.Text(), "~")
		}
	}
	return l, understood
}
