package kube

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/nametap/nametap/discovery/object"
)

// slim is an object reduced to what the tables need. It takes the place of the whole object in
// client-go until it is in the feed.
type slim struct {
	object object.Object
	errs   []object.Error // the object cannot be used if there are any
	// version is that of the resource when the object became what it is, or was removed; 0 if unknown.
	version uint64
}

// GetObjectMeta returns the part of the metadata by which client-go tells objects apart.
func (s *slim) GetObjectMeta() metav1.Object {
	return &metav1.ObjectMeta{Namespace: s.object.Key.Namespace, Name: s.object.Key.Name}
}

// reduce returns the slim form of an object from client-go.
func reduce(whole any) (*slim, error) {
	switch o := whole.(type) {
	case *slim:
		return o, nil
	case *corev1.Service:
		return reduceService(o), nil
	case *discoveryv1.EndpointSlice:
		return reduceSlice(o), nil
	case *metav1.PartialObjectMetadata:
		return reduceNamespace(o), nil
	case *corev1.ConfigMap:
		return reduceMesh(o), nil
	case *unstructured.Unstructured:
		switch o.GetKind() {
		case object.KindServiceEntry:
			return reduceEntry(o), nil
		case object.KindSidecar:
			return reduceSidecar(o), nil
		case object.KindServiceImport:
			return reduceImport(o), nil
		}
		return nil, fmt.Errorf("unexpected object of kind %q", o.GetKind())
	}
	return nil, fmt.Errorf("unexpected object of type %T", whole)
}

func newSlim(kind string, o metav1.Object) *slim {
	namespace, name := strings.Clone(o.GetNamespace()), strings.Clone(o.GetName())
	return &slim{object: object.Object{Key: object.Key{Kind: kind, Namespace: namespace, Name: name}}}
}

// fail records an error in a field.
func (s *slim) fail(field, format string, args ...any) {
	s.errs = append(s.errs, object.Error{
		File: s.object.Key.String(), Field: field, Msg: fmt.Sprintf(format, args...), Object: s.object.Key,
	})
}

func reduceService(o *corev1.Service) *slim {
	s := newSlim(object.KindService, o)
	service := &object.Service{PublishNotReady: o.Spec.PublishNotReadyAddresses}
	if o.Spec.Type == corev1.ServiceTypeExternalName {
		service.ExternalName = strings.Clone(strings.TrimSuffix(o.Spec.ExternalName, "."))
	}
	for _, text := range append([]string{o.Spec.ClusterIP}, o.Spec.ClusterIPs...) {
		switch a, err := netip.ParseAddr(text); {
		case text == object.ClusterIPNone:
			service.Headless = true
		case text == "": // of an ExternalName
		case err != nil:
			s.fail("spec.clusterIPs", "want an IP address, got %q", text)
		case !slices.Contains(service.ClusterIPs, a.Unmap()):
			service.ClusterIPs = append(service.ClusterIPs, a.Unmap())
		}
	}
	ports := make([]object.Port, 0, len(o.Spec.Ports))
	for i, p := range o.Spec.Ports {
		number := p.Port
		if service.Headless && p.TargetPort != (intstr.IntOrString{}) {
			number = p.TargetPort.IntVal // 0 if it is a name
		}
		ports = s.addPort(ports, fmt.Sprintf("spec.ports[%d]", i), object.Port{Name: p.Name, Protocol: string(p.Protocol)}, number)
	}
	service.Ports = object.NewPorts(ports)
	if text, ok := o.Annotations[object.AnnotationExportTo]; ok {
		var err error
		if service.ExportTo, err = object.ParseExportTo(text, o.Namespace); err != nil {
			s.fail("metadata.annotations."+object.AnnotationExportTo, "%v", err)
		}
	}
	if text, ok := o.Annotations[object.AnnotationScope]; ok {
		if err := service.HeadlessScope.UnmarshalText([]byte(text)); err != nil {
			s.fail("metadata.annotations."+object.AnnotationScope, "%v", err)
		}
	}
	s.object.Service = service
	return s
}

// addPort appends a port of a field with this number. It leaves it out if the number is 0.
func (s *slim) addPort(ports []object.Port, field string, p object.Port, number int32) []object.Port {
	var err error
	switch p.Protocol, err = object.ParseProtocol(p.Protocol); {
	case err != nil:
		s.fail(field+".protocol", "%v", err)
	case number < 0 || number > math.MaxUint16:
		s.fail(field+".port", "want a port number, 1 to 65535, got %d", number)
	case p.Name != "" && !object.IsLabel(p.Name):
		s.fail(field+".name", "want a DNS label, got %q", p.Name)
	case number != 0:
		p.Number = uint16(number)
		return append(ports, p)
	}
	return ports
}

// value returns what p points to, or the zero value.
func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func reduceSlice(o *discoveryv1.EndpointSlice) *slim {
	s := newSlim(object.KindEndpointSlice, o)
	slice := &object.EndpointSlice{Service: strings.Clone(o.Labels[object.LabelServiceName]), Import: object.NewImportedSlice(o.Labels)}
	s.object.Slice = slice
	if o.AddressType == discoveryv1.AddressTypeFQDN {
		return s // it holds names, not addresses
	}
	ports := make([]object.Port, 0, len(o.Ports))
	for i, p := range o.Ports {
		if p.Port != nil { // it stands for all ports otherwise
			one := object.Port{Name: value(p.Name), Protocol: string(value(p.Protocol))}
			ports = s.addPort(ports, fmt.Sprintf("ports[%d]", i), one, *p.Port)
		}
	}
	slice.Ports = object.NewPorts(ports)
	slice.Endpoints = make([]object.Endpoint, 0, len(o.Endpoints))
	for i, e := range o.Endpoints {
		endpoint := object.Endpoint{Ready: e.Conditions.Ready == nil || *e.Conditions.Ready}
		if e.Hostname != nil {
			endpoint.Hostname = strings.Clone(*e.Hostname)
		}
		for _, text := range e.Addresses {
			a, err := netip.ParseAddr(text)
			if err != nil {
				s.fail(fmt.Sprintf("endpoints[%d].addresses", i), "want an IP address, got %q", text)
				continue
			}
			endpoint.Addrs = append(endpoint.Addrs, a.Unmap())
		}
		slice.Endpoints = append(slice.Endpoints, endpoint)
	}
	return s
}

// serviceEntry has the fields of an Istio ServiceEntry that are used.
type serviceEntry struct {
	Spec struct {
		Hosts      []string `json:"hosts"`
		Addresses  []string `json:"addresses"`
		Resolution string   `json:"resolution"`
		ExportTo   []string `json:"exportTo"`
		Ports      []struct {
			Name       string `json:"name"`
			Protocol   string `json:"protocol"`
			Number     int64  `json:"number"`
			TargetPort int64  `json:"targetPort"`
		} `json:"ports"`
		Endpoints []struct {
			Address string           `json:"address"`
			Ports   map[string]int64 `json:"ports"`
		} `json:"endpoints"`
	} `json:"spec"`
}

// serviceEntryStatus has the fields of the status of a ServiceEntry that are used.
type serviceEntryStatus struct {
	Status struct {
		Addresses []struct {
			Host  string `json:"host"`
			Value string `json:"value"`
		} `json:"addresses"`
	} `json:"status"`
}

func reduceEntry(o *unstructured.Unstructured) *slim {
	s := newSlim(object.KindServiceEntry, o)
	var from serviceEntry
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &from); err != nil {
		s.fail("spec", "%v", err)
		return s
	}
	entry := &object.ServiceEntry{
		HasAddresses: len(from.Spec.Addresses) > 0,
		Resolution:   from.Spec.Resolution,
		NoVIP:        strings.EqualFold(o.GetLabels()[object.LabelAutoAllocate], "false"),
	}
	s.object.Entry = entry
	if entry.Resolution == "" {
		entry.Resolution = object.ResolutionNone
	}
	for i, host := range from.Spec.Hosts {
		host = strings.TrimSuffix(host, ".")
		if !object.IsHost(host) {
			s.fail(fmt.Sprintf("spec.hosts[%d]", i), "want a DNS name or *.suffix, got %q", host)
		}
		entry.Hosts = append(entry.Hosts, host)
	}
	for i, text := range from.Spec.Addresses {
		a, err := object.ParseAddress(text)
		if err != nil {
			s.fail(fmt.Sprintf("spec.addresses[%d]", i), "%v", err)
		}
		if a.IsValid() {
			entry.Addrs = append(entry.Addrs, a)
		}
	}
	entry.Destinations = s.destinations(entry.Resolution, &from)
	addVIPs(entry, o)
	var err error
	if entry.ExportTo, err = object.NewExportTo(from.Spec.ExportTo, o.GetNamespace()); err != nil {
		s.fail("spec.exportTo", "%v", err)
	}
	return s
}

// destinations returns where connections to the hosts of a ServiceEntry lead.
func (s *slim) destinations(resolution string, from *serviceEntry) object.Destinations {
	var ports []object.EntryPort
	for i, p := range from.Spec.Ports {
		field := fmt.Sprintf("spec.ports[%d]", i)
		ports = append(ports, object.EntryPort{
			Name: p.Name, Protocol: p.Protocol,
			Number: s.port(field+".number", p.Number), Target: s.port(field+".targetPort", p.TargetPort),
		})
	}
	var endpoints []object.EntryEndpoint
	for i, e := range from.Spec.Endpoints {
		field := fmt.Sprintf("spec.endpoints[%d]", i)
		endpoint := object.EntryEndpoint{Ports: map[string]uint16{}}
		for name, number := range e.Ports {
			endpoint.Ports[name] = s.port(field+".ports."+name, number)
		}
		if e.Address == "" || object.IsSocket(e.Address) {
			continue // of a network that its gateways lead to, or on the host of a proxy
		}
		var err error
		if endpoint.Address, err = object.ParseEndpoint(e.Address); err != nil {
			s.fail(field+".address", "%v", err)
			continue
		}
		endpoints = append(endpoints, endpoint)
	}
	return object.NewDestinations(resolution, ports, endpoints)
}

// port returns the number of a port in a field, 0 if it is absent or invalid.
func (s *slim) port(field string, number int64) uint16 {
	if number < 0 || number > math.MaxUint16 {
		s.fail(field, "want a port number, 1 to 65535, got %d", number)
		return 0
	}
	return uint16(number)
}

// addVIPs adds the VIPs in the status of a ServiceEntry. What is no VIP there is no reason to leave the object
// out: its author writes the spec only.
func addVIPs(entry *object.ServiceEntry, o *unstructured.Unstructured) {
	var from serviceEntryStatus
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &from); err != nil {
		entry.StaleVIPs = true
		return
	}
	for _, vip := range from.Status.Addresses {
		a, err := netip.ParseAddr(vip.Value)
		if err != nil || a.Zone() != "" {
			entry.StaleVIPs = true
			continue
		}
		entry.AddVIP(vip.Host, a.Unmap())
	}
}

// sidecar has the fields of an Istio Sidecar that are used.
type sidecar struct {
	Spec struct {
		WorkloadSelector struct {
			Labels map[string]string `json:"labels"`
		} `json:"workloadSelector"`
		Egress []struct {
			Hosts []string `json:"hosts"`
		} `json:"egress"`
	} `json:"spec"`
}

func reduceSidecar(o *unstructured.Unstructured) *slim {
	s := newSlim(object.KindSidecar, o)
	var from sidecar
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &from); err != nil {
		s.fail("spec", "%v", err)
		return s
	}
	sidecar := &object.Sidecar{Labels: from.Spec.WorkloadSelector.Labels, Created: o.GetCreationTimestamp().Time}
	s.object.Sidecar = sidecar
	if len(from.Spec.Egress) > 0 {
		sidecar.Egress = []object.EgressHost{}
	}
	for i, listener := range from.Spec.Egress {
		for j, text := range listener.Hosts {
			h, ok, err := object.ParseEgressHost(text)
			if err != nil {
				s.fail(fmt.Sprintf("spec.egress[%d].hosts[%d]", i, j), "%v", err)
			}
			if ok {
				sidecar.Egress = append(sidecar.Egress, h)
			}
		}
	}
	return s
}
