package decode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/nametap/nametap/discovery/object"
)

// A service is a Kubernetes Service.
type service struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Type            string            `json:"type"`
		ClusterIP       string            `json:"clusterIP"`
		ClusterIPs      []string          `json:"clusterIPs"`
		ExternalName    string            `json:"externalName"`
		Selector        map[string]string `json:"selector"`
		PublishNotReady bool              `json:"publishNotReadyAddresses"`
		Ports           []port            `json:"ports"`
	} `json:"spec"`
}

func (f *service) metadata() *Meta { return &f.Metadata }

func (f *service) decode(d *decoder, o *object.Object) {
	s := &object.Service{Selector: f.Spec.Selector, PublishNotReady: f.Spec.PublishNotReady}
	o.Service = s
	switch f.Spec.Type {
	case "", "ClusterIP", "NodePort", "LoadBalancer":
	case "ExternalName":
		s.ExternalName = strings.TrimSuffix(f.Spec.ExternalName, ".") // Kubernetes allows the dot
		if !object.IsHost(s.ExternalName) || object.IsWildcard(s.ExternalName) {
			d.fail(fmt.Errorf("want a DNS name, got %q", f.Spec.ExternalName), "spec.externalName")
			s.ExternalName = ""
		}
	default:
		d.fail(fmt.Errorf("want ClusterIP, NodePort, LoadBalancer or ExternalName, got %q", f.Spec.Type), "spec.type")
	}
	// The API server keeps clusterIP equal to the first of clusterIPs. A file may have only one of the two fields.
	for i, text := range append([]string{f.Spec.ClusterIP}, f.Spec.ClusterIPs...) {
		field := "spec.clusterIP"
		if i > 0 {
			field = fmt.Sprintf("spec.clusterIPs[%d]", i-1)
		}
		if text == object.ClusterIPNone {
			s.Headless = true
		} else if a := d.addr(text, "%s", field); a.IsValid() && !slices.Contains(s.ClusterIPs, a) {
			s.ClusterIPs = append(s.ClusterIPs, a)
		}
	}
	if s.Headless && len(s.ClusterIPs) > 0 {
		d.fail(fmt.Errorf("clusterIP and clusterIPs hold both %s and an address", object.ClusterIPNone), "spec.clusterIP")
	}
	s.Ports, s.Numbers = d.ports(f.Spec.Ports, "spec.ports", s.Headless)
	switch scope := f.Metadata.Annotations[object.AnnotationScope]; scope {
	case "", "network":
	case "cluster":
		s.ClusterOnly = true
	default:
		d.fail(fmt.Errorf("want network or cluster, got %q", scope), "metadata.annotations."+object.AnnotationScope)
	}
	var err error
	if s.ExportTo, err = object.NewExportTo(object.SplitScopes(f.Metadata.Annotations[object.AnnotationExportTo]), d.key.Namespace); err != nil {
		d.fail(err, "metadata.annotations."+object.AnnotationExportTo)
	}
}

// A number is the number of a port; 0 if it is missing.
type number uint16

// UnmarshalJSON decodes a number.
func (n *number) UnmarshalJSON(data []byte) error {
	err := json.Unmarshal(data, (*uint16)(n))
	if err == nil && string(data) == "0" {
		err = &json.UnmarshalTypeError{Value: "number 0", Type: reflect.TypeFor[number]()}
	}
	return err
}

// A target is the targetPort of a Service: a number, or the name of a port of Pods.
type target struct {
	number number
	named  bool
}

// UnmarshalJSON decodes a targetPort.
func (t *target) UnmarshalJSON(data []byte) error {
	if t.named = data[0] == '"'; t.named {
		return nil
	}
	return json.Unmarshal(data, &t.number)
}

// A port is a port of a Service, an EndpointSlice or a ServiceImport.
type port struct {
	Name     string `json:"name"`
	Number   number `json:"port"`
	Protocol string `json:"protocol"`
	Target   target `json:"targetPort"`
}

// ports returns the ports in a field, and their numbers. If targets is true, a port gets the number of its targetPort,
// and a port whose targetPort is a name is left out. A port without a number is left out, too: in an EndpointSlice it
// stands for all ports.
func (d *decoder) ports(list []port, field string, targets bool) (all object.Ports, numbers []uint16) {
	var ports []object.Port
	names := map[string]bool{}
	for i, f := range list {
		p := object.Port{Name: f.Name, Number: uint16(f.Number), Protocol: cmp.Or(f.Protocol, "TCP")}
		switch {
		case p.Name != "" && !object.IsLabel(p.Name):
			d.fail(fmt.Errorf("want a DNS label, got %q", p.Name), "%s[%d].name", field, i)
		case names[p.Name]:
			d.fail(fmt.Errorf("want a name that no other port has, got %q", p.Name), "%s[%d].name", field, i)
		case p.Protocol != "TCP" && p.Protocol != "UDP" && p.Protocol != "SCTP":
			d.fail(fmt.Errorf("want TCP, UDP or SCTP, got %q", p.Protocol), "%s[%d].protocol", field, i)
		default:
			names[p.Name], numbers = true, append(numbers, p.Number)
			if targets {
				p.Number = cmp.Or(uint16(f.Target.number), p.Number)
			}
			if p.Number != 0 && (!targets || !f.Target.named) {
				ports = append(ports, p)
			}
		}
	}
	return object.NewPorts(ports), numbers
}

// addr returns the IP address in a field; the zero Addr if it is missing or invalid.
func (d *decoder) addr(text, field string, args ...any) netip.Addr {
	if text == "" {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		d.fail(fmt.Errorf("want an IP address, got %q", text), field, args...)
		return netip.Addr{}
	}
	return a.Unmap()
}

// hostname returns a field if it is a label of a DNS name, and "" if it is missing or invalid.
func (d *decoder) hostname(text, field string, args ...any) string {
	if text != "" && !object.IsLabel(text) {
		d.fail(fmt.Errorf("want a DNS label, got %q", text), field, args...)
		return ""
	}
	return text
}

// An endpointSlice is a Kubernetes EndpointSlice.
type endpointSlice struct {
	Metadata    Meta   `json:"metadata"`
	AddressType string `json:"addressType"`
	Ports       []port `json:"ports"`
	Endpoints   []struct {
		Addresses  []string `json:"addresses"`
		Conditions struct {
			Ready *bool `json:"ready"`
		} `json:"conditions"`
		Hostname  string `json:"hostname"`
		TargetRef struct {
			Kind string `json:"kind"`
			Name string `json:"name"`
		} `json:"targetRef"`
	} `json:"endpoints"`
}

func (f *endpointSlice) metadata() *Meta { return &f.Metadata }

func (f *endpointSlice) decode(d *decoder, o *object.Object) {
	labels := f.Metadata.Labels
	s := &object.EndpointSlice{Service: labels[object.LabelServiceName], Import: labels[object.LabelImport]}
	if cluster := labels[object.LabelSourceCluster]; object.IsLabel(cluster) {
		s.Cluster = cluster
	}
	o.Slice = s
	switch f.AddressType {
	case "", "IPv4", "IPv6":
	case "FQDN":
		return // the slice holds names, not addresses
	default:
		d.fail(fmt.Errorf("want IPv4, IPv6 or FQDN, got %q", f.AddressType), "addressType")
		return
	}
	s.Ports, _ = d.ports(f.Ports, "ports", false)
	for i, e := range f.Endpoints {
		ep := object.Endpoint{Ready: e.Conditions.Ready == nil || *e.Conditions.Ready, Hostname: d.hostname(e.Hostname, "endpoints[%d].hostname", i)}
		for k, text := range e.Addresses {
			if a := d.addr(text, "endpoints[%d].addresses[%d]", i, k); a.IsValid() {
				ep.Addrs = append(ep.Addrs, a)
			}
		}
		if e.TargetRef.Kind == object.KindPod {
			ep.Pod = e.TargetRef.Name
		}
		s.Endpoints = append(s.Endpoints, ep)
	}
}

// A serviceImport is a ServiceImport of the Multi-Cluster Services API.
type serviceImport struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Type  string   `json:"type"`
		IPs   []string `json:"ips"`
		Ports []port   `json:"ports"`
	} `json:"spec"`
}

func (f *serviceImport) metadata() *Meta { return &f.Metadata }

func (f *serviceImport) decode(d *decoder, o *object.Object) {
	s := &object.ServiceImport{Headless: f.Spec.Type == object.ImportHeadless}
	o.Import = s
	for i, text := range f.Spec.IPs {
		if a := d.addr(text, "spec.ips[%d]", i); a.IsValid() {
			s.IPs = append(s.IPs, a)
		}
	}
	s.Ports, s.Numbers = d.ports(f.Spec.Ports, "spec.ports", false)
	if !s.Headless && f.Spec.Type != object.ImportClusterSetIP {
		d.fail(fmt.Errorf("want %s or %s, got %q", object.ImportClusterSetIP, object.ImportHeadless, f.Spec.Type), "spec.type")
	}
	if host := object.ImportHost(d.key); !object.IsHost(host) {
		d.fail(fmt.Errorf("makes the host %q, which is no DNS name", host), "metadata.name")
	}
}

// A pod is a Kubernetes Pod.
type pod struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Hostname  string `json:"hostname"`
		Subdomain string `json:"subdomain"`
	} `json:"spec"`
	Status struct {
		Phase      string  `json:"phase"`
		PodIP      string  `json:"podIP"`
		PodIPs     []podIP `json:"podIPs"`
		Conditions []struct {
			Type   string `json:"type"`
			Status string `json:"status"`
		} `json:"conditions"`
	} `json:"status"`
}

type podIP struct {
	IP string `json:"ip"`
}

func (f *pod) metadata() *Meta { return &f.Metadata }

func (f *pod) decode(d *decoder, o *object.Object) {
	p := &object.Pod{
		Labels: f.Metadata.Labels, Hostname: d.hostname(f.Spec.Hostname, "spec.hostname"), Subdomain: f.Spec.Subdomain,
		Terminated: f.Status.Phase == "Succeeded" || f.Status.Phase == "Failed" || f.Metadata.DeletionTimestamp != "",
	}
	o.Pod = p
	for i, ip := range append(f.Status.PodIPs, podIP{f.Status.PodIP}) { // podIP is the first of podIPs
		if a := d.addr(ip.IP, "status.podIPs[%d].ip", i); a.IsValid() && !slices.Contains(p.Addrs, a) {
			p.Addrs = append(p.Addrs, a)
		}
	}
	for _, c := range f.Status.Conditions {
		if c.Type == "Ready" {
			p.Ready = c.Status == "True"
		}
	}
}

// A selector is the workloadSelector of Istio's kinds.
type selector struct {
	Labels map[string]string `json:"labels"`
}

// A serviceEntry is an Istio ServiceEntry.
type serviceEntry struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Hosts      []string        `json:"hosts"`
		Addresses  []string        `json:"addresses"`
		Resolution string          `json:"resolution"`
		Selector   selector        `json:"workloadSelector"`
		ExportTo   []string        `json:"exportTo"`
		Ports      []entryPort     `json:"ports"`
		Endpoints  []entryEndpoint `json:"endpoints"`
	} `json:"spec"`
	Status entryStatus `json:"status"`
}

// An entryPort is a port of a ServiceEntry.
type entryPort struct {
	Name     string `json:"name"`
	Number   number `json:"number"`
	Protocol string `json:"protocol"`
	Target   number `json:"targetPort"`
}

// An entryEndpoint is an endpoint of a ServiceEntry.
type entryEndpoint struct {
	Address string            `json:"address"`
	Ports   map[string]uint16 `json:"ports"`
}

// An entryStatus has the automatic VIPs that istiod has written to the status of a ServiceEntry, by the host. The status may
// be older than the spec, and have hosts that the spec has no more.
type entryStatus map[string][]netip.Addr

// UnmarshalJSON decodes what is right of a status. The rest is no error, because the author of the object does not write
// the status.
func (s *entryStatus) UnmarshalJSON(data []byte) error {
	var from struct {
		Addresses []struct{ Host, Value string } `json:"addresses"`
	}
	_ = json.Unmarshal(data, &from)
	*s = entryStatus{}
	for _, f := range from.Addresses {
		if a := new(decoder).addr(f.Value, ""); a.IsValid() {
			host := strings.TrimSuffix(f.Host, ".")
			(*s)[host] = append((*s)[host], a)
		}
	}
	return nil
}

func (f *serviceEntry) metadata() *Meta { return &f.Metadata }

func (f *serviceEntry) decode(d *decoder, o *object.Object) {
	e := &object.ServiceEntry{
		Resolution: object.ResolutionNone, Created: f.Metadata.Created(),
		NoVIP: strings.EqualFold(f.Metadata.Labels[object.LabelAutoAllocate], "false"),
	}
	o.Entry = e
	f.decodeHosts(d, e)
	switch r := f.Spec.Resolution; r {
	case "":
	case object.ResolutionNone, object.ResolutionStatic, object.ResolutionDNS, object.ResolutionRoundRobin, object.ResolutionDynamic:
		e.Resolution = r
	default:
		d.fail(fmt.Errorf("want NONE, STATIC, DNS, DNS_ROUND_ROBIN or DYNAMIC_DNS, got %q", r), "spec.resolution")
	}
	if e.Resolution == object.ResolutionNone {
		e.Selector = f.Spec.Selector.Labels
	}
	ports, endpoints := d.entryPorts(f.Spec.Ports), d.entryEndpoints(f.Spec.Endpoints)
	for _, p := range ports {
		e.Numbers = append(e.Numbers, p.Number)
	}
	if size := sizeInTables(e, ports, endpoints); size > object.MaxInTables {
		d.fail(fmt.Errorf("its hosts have %d KiB in tables: %d hosts, each with %d addresses and with %d ports of %d endpoints; want at most %d KiB, use several objects",
			size>>10, len(e.Hosts), len(e.Addrs), len(ports), len(endpoints), object.MaxInTables>>10), "spec")
		e.Hosts = nil
	} else {
		e.Destinations = object.NewDestinations(e.Resolution, ports, endpoints)
		e.VIPs = f.Status
	}
	var err error
	if e.ExportTo, err = object.NewExportTo(f.Spec.ExportTo, d.key.Namespace); err != nil {
		d.fail(err, "spec.exportTo")
	}
}

// decodeHosts decodes the hosts and the addresses.
func (f *serviceEntry) decodeHosts(d *decoder, e *object.ServiceEntry) {
	for i, text := range f.Spec.Hosts {
		if host := strings.TrimSuffix(text, "."); object.IsHost(host) {
			e.Hosts = append(e.Hosts, host)
		} else {
			d.fail(fmt.Errorf("want a DNS name or *.suffix, got %q", text), "spec.hosts[%d]", i)
		}
	}
	if len(f.Spec.Hosts) == 0 {
		d.fail(errors.New("is missing: a ServiceEntry needs at least one host"), "spec.hosts")
	}
	for i, text := range f.Spec.Addresses {
		a, err := object.ParseAddress(text)
		if object.IsVIP(a) { // otherwise the author could choose the VIP of another namespace's host
			d.fail(fmt.Errorf("is left out: %s is in the range of automatic VIPs, which no author chooses", a), "spec.addresses[%d]", i)
			continue
		}
		e.HasAddresses = true
		if err != nil {
			d.fail(err, "spec.addresses[%d]", i)
		} else if a.IsValid() {
			e.Addrs = append(e.Addrs, a)
		}
	}
}

// entryPorts returns the ports of a ServiceEntry.
func (d *decoder) entryPorts(list []entryPort) (ports []object.EntryPort) {
	names := map[string]bool{}
	for i, f := range list {
		if f.Name != "" && names[f.Name] {
			d.fail(fmt.Errorf("want a name that no other port has, got %q", f.Name), "spec.ports[%d].name", i)
			continue
		}
		names[f.Name] = true
		ports = append(ports, object.EntryPort{Name: f.Name, Protocol: f.Protocol, Number: uint16(f.Number), Target: uint16(f.Target)})
	}
	return ports
}

// entryEndpoints returns the endpoints of a ServiceEntry, without Unix sockets.
func (d *decoder) entryEndpoints(list []entryEndpoint) (endpoints []object.EntryEndpoint) {
	for i, f := range list {
		if f.Address == "" || strings.HasPrefix(f.Address, "unix://") { // of the client's host, for a proxy there
			continue
		}
		if address, err := object.ParseEndpoint(f.Address); err != nil {
			d.fail(err, "spec.endpoints[%d].address", i)
		} else {
			endpoints = append(endpoints, object.EntryEndpoint{Address: address, Ports: f.Ports})
		}
	}
	return endpoints
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

// A sidecar is an Istio Sidecar.
type sidecar struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Selector selector          `json:"workloadSelector"`
		Egress   []json.RawMessage `json:"egress"`
	} `json:"spec"`
}

func (f *sidecar) metadata() *Meta { return &f.Metadata }

func (f *sidecar) decode(d *decoder, o *object.Object) {
	s := &object.Sidecar{Labels: f.Spec.Selector.Labels, Created: f.Metadata.Created()}
	o.Sidecar = s
	for i, data := range f.Spec.Egress {
		if s.Egress == nil {
			s.Egress = []object.EgressListener{}
		}
		field := fmt.Sprintf("spec.egress[%d]", i)
		if l, understood := d.listener(data, field); understood {
			s.Egress = append(s.Egress, l)
		} else {
			d.fail(errors.New("is not understood: the listener shows no host"), "%s", field)
		}
	}
}

// A listener is an egress listener of a Sidecar.
type listener struct {
	Hosts []string `json:"hosts"`
	Port  struct {
		Number   uint16 `json:"number"`
		Protocol string `json:"protocol"`
	} `json:"port"`
}

// listener decodes an egress listener. understood is false if a part that limits its hosts is not: without that part,
// the listener would show more hosts than its author wanted. A host that is not understood is left out.
func (d *decoder) listener(data []byte, field string) (l object.EgressListener, understood bool) {
	var f listener
	var members map[string]json.RawMessage
	if err := errors.Join(json.Unmarshal(data, &members), json.Unmarshal(data, &f)); err != nil {
		d.add(Mismatch(err, field))
		return l, false
	}
	understood = true
	for _, name := range slices.Sorted(maps.Keys(members)) {
		switch name {
		case "hosts", "port", "bind", "captureMode":
		default:
			d.fail(errors.New("is not known"), "%s.%s", field, name)
			understood = false
		}
	}
	// As in istiod, a listener that is an HTTP proxy, or has no number, shows hosts with any port.
	if l.Port = int(f.Port.Number); strings.EqualFold(f.Port.Protocol, "HTTP_PROXY") {
		l.Port = object.ProxyPort
	}
	for i, text := range f.Hosts {
		h, err := object.ParseEgressHost(text)
		if err == nil {
			l.Hosts = append(l.Hosts, h)
			continue
		}
		d.fail(err, "%s.hosts[%d]", field, i)
		understood = understood && !strings.HasPrefix(text, "~")
	}
	return l, understood
}
