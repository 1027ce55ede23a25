package interop

import (
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

var services = flag.Int("interop.services", 10_000, "Services of the tests that measure nametap-discovery")

const (
	// scalePrefix begins the names of a population's namespaces.
	scalePrefix = "scale-"
	// scaleNamespaces is the number of namespaces of a population.
	scaleNamespaces = 100
	// endpoints is the number of endpoints of a Service.
	endpoints = 10
	// headlessEvery says which share of the Services is headless: one in so many.
	headlessEvery = 10
	// hidden is the exportTo of a Service that no workload sees.
	hidden = "~"
)

// A population is a number of Services with their EndpointSlices. Each is a function of its number, so
// that a test knows it without asking. The Services have no selectors, so Kubernetes' controllers leave
// them alone.
type population struct{ services int }

// namespace returns the namespace of a Service.
func (population) namespace(i int) string {
	return fmt.Sprintf("%s%02d", scalePrefix, i%scaleNamespaces)
}

// name returns the name of a Service.
func (population) name(i int) string { return fmt.Sprintf("app-%05d", i) }

// host returns the host of a Service.
func (p population) host(i int) string {
	return p.name(i) + "." + p.namespace(i) + ".svc.cluster.local"
}

// headless reports whether a Service is headless. Each namespace has some of these.
func (population) headless(i int) bool { return i/scaleNamespaces%headlessEvery == 0 }

// nth returns the number of a Service among the headless ones, or among the others, from 0.
func (p population) nth(headless bool, n int) int {
	for i := 0; ; i++ {
		if p.headless(i) == headless {
			if n == 0 {
				return i
			}
			n--
		}
	}
}

// entries returns the entries of a Service in the table of a workload that sees it.
func (p population) entries(i, version int) table {
	t := table{}
	add := func(shortname string, ips ...string) {
		t[shortname+"."+p.namespace(i)+".svc.cluster.local"] = entry{IPs: ips, Registry: "Kubernetes", Shortname: shortname, Namespace: p.namespace(i)}
	}
	if !p.headless(i) {
		add(p.name(i), p.clusterIP(i))
		return t
	}
	add(p.name(i), strings.Split(p.answer(i, version), " ")...)
	for number := range endpoints {
		add(fmt.Sprintf("%s-%d.%s", p.name(i), number, p.name(i)), p.endpoint(i, number, version))
	}
	return t.normal()
}

// answer returns the answer for a headless Service, as ask does.
func (p population) answer(i, version int) string {
	var all []string
	for number := range endpoints {
		all = append(all, p.endpoint(i, number, version))
	}
	slices.Sort(all)
	return strings.Join(all, " ")
}

// clusterIP returns the cluster IP of a Service.
func (p population) clusterIP(i int) string {
	if p.headless(i) {
		return corev1.ClusterIPNone
	}
	return netip.AddrFrom4([4]byte{10, 96, byte(16 + i/250), byte(1 + i%250)}).String()
}

// endpoint returns the address of an endpoint. Each version has others.
func (population) endpoint(i, number, version int) string {
	n := i*endpoints + number
	return netip.AddrFrom4([4]byte{10, byte(128 + version%8*8 + n>>16), byte(n >> 8), byte(n)}).String()
}

// service returns a Service; exportTo is empty for one that all workloads see.
func (p population) service(i int, exportTo string) *corev1.Service {
	s := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Name: p.name(i), Namespace: p.namespace(i), Labels: map[string]string{"app": p.name(i)}},
		Spec: corev1.ServiceSpec{
			ClusterIP: p.clusterIP(i),
			Ports: []corev1.ServicePort{
				{Name: "http", Port: 80, TargetPort: intstr.FromInt32(8080)},
				{Name: "metrics", Port: 9090, TargetPort: intstr.FromInt32(9090)},
			},
		},
	}
	if exportTo != "" {
		s.Annotations = map[string]string{"networking.istio.io/exportTo": exportTo}
	}
	return s
}

// slice returns the EndpointSlice of a Service, with what the EndpointSlice controller writes, but for the
// references to Pods: there are no Pods, and istiod skips endpoints whose Pod is missing.
func (p population) slice(i, version int) *discoveryv1.EndpointSlice {
	yes, no, http, protocol, port := true, false, "http", corev1.ProtocolTCP, int32(8080)
	s := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Name: p.name(i) + "-x7k2p", Namespace: p.namespace(i), GenerateName: p.name(i) + "-",
			Labels: map[string]string{
				"app": p.name(i), discoveryv1.LabelServiceName: p.name(i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io",
			},
			Annotations: map[string]string{corev1.EndpointsLastChangeTriggerTime: "2026-01-01T00:00:00Z"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &http, Protocol: &protocol, Port: &port}},
	}
	if p.headless(i) {
		s.Labels[corev1.IsHeadlessService] = ""
	}
	for number := range endpoints {
		node, pod := fmt.Sprintf("node-%03d", (i+number)%500), fmt.Sprintf("%s-%d", p.name(i), number)
		e := discoveryv1.Endpoint{
			Addresses:  []string{p.endpoint(i, number, version)},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes, Terminating: &no},
			NodeName:   &node,
		}
		if p.headless(i) {
			e.Hostname = &pod
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

// table returns the part of a workload's table that must follow from the population at the API
// server. It knows what the tests make of it: hosts that all workloads see, and hosts that none
// sees. pods is true if endpoints have hosts; istiod takes endpoints' hosts from Pods, and there
// are none.
func (w *writer) table(pods bool) table {
	w.c.tb.Helper()
	var all corev1.ServiceList
	var headlessSlices discoveryv1.EndpointSliceList
	w.must(request{method: http.MethodGet, path: servicePath("", ""), result: &all})
	w.must(request{method: http.MethodGet, path: slicePath("", "") + "?labelSelector=" + corev1.IsHeadlessService, result: &headlessSlices})
	t := table{}
	add := func(s *corev1.Service, shortname, ip string) {
		host := shortname + "." + s.Namespace + ".svc.cluster.local"
		e := t[host]
		t[host] = entry{IPs: append(e.IPs, ip), Registry: "Kubernetes", Shortname: shortname, Namespace: s.Namespace}
	}
	headless := map[string]*corev1.Service{}
	for _, s := range all.Items {
		switch {
		case !strings.HasPrefix(s.Namespace, scalePrefix):
		case s.Annotations["networking.istio.io/exportTo"] == hidden:
		case s.Spec.ClusterIP == corev1.ClusterIPNone:
			headless[s.Namespace+"/"+s.Name] = &s
		default:
			add(&s, s.Name, s.Spec.ClusterIP)
		}
	}
	for _, slice := range headlessSlices.Items {
		s := headless[slice.Namespace+"/"+slice.Labels[discoveryv1.LabelServiceName]]
		if s == nil {
			continue
		}
		for _, e := range slice.Endpoints {
			add(s, s.Name, e.Addresses[0])
			if pods {
				add(s, *e.Hostname+"."+s.Name, e.Addresses[0])
			}
		}
	}
	return t.normal()
}

// scaled returns the part of a table that is about the population.
func (t table) scaled() table {
	t = maps.Clone(t)
	maps.DeleteFunc(t, func(_ string, e entry) bool { return !strings.HasPrefix(e.Namespace, scalePrefix) })
	return t
}
