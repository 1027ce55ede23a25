package discovery

import (
	"fmt"
	"net/netip"
	"slices"
)

// The kinds of objects that make hosts. Everything else is skipped.
const (
	kindService       = "Service"
	kindEndpointSlice = "EndpointSlice"
	kindPod           = "Pod"
	kindServiceEntry  = "ServiceEntry"
)

// DocumentError says what is wrong with one document of the configuration
// directory. The object it describes is left out, or kept in its last good
// form if there is one.
type DocumentError struct {
	File  string `json:"file"`            // path below the configuration directory
	Line  int    `json:"line,omitempty"`  // 1-based; 0 if the whole file is meant
	Field string `json:"field,omitempty"` // "spec.clusterIP"; empty if no field is to blame
	Msg   string `json:"message"`
	Kept  bool   `json:"kept,omitempty"` // the object's last good form still counts

	object key // the object, as far as it is known
}

// Error formats as "file:line: field: message".
func (e DocumentError) Error() string {
	s := e.File
	if e.Line > 0 {
		s = fmt.Sprintf("%s:%d", s, e.Line)
	}
	if e.Field != "" {
		s += ": " + e.Field
	}
	return s + ": " + e.Msg
}

// key identifies an object: no two objects may share one.
type key struct {
	kind, namespace, name string
}

func (k key) String() string { return fmt.Sprintf("%s %s/%s", k.kind, k.namespace, k.name) }

// object is one parsed object; exactly one of the pointers is set.
type object struct {
	key  key
	file string
	line int
	text *chunk // the document that it was read from

	service *service
	slice   *endpointSlice
	pod     *pod
	entry   *serviceEntry
}

// service is what counts of a Kubernetes Service.
type service struct {
	externalName    bool
	headless        bool
	clusterIPs      []netip.Addr
	selector        map[string]string
	publishNotReady bool
	exportTo        exportTo
}

// unallocated reports whether the Service awaits an address that a cluster
// would allocate.
func (s *service) unallocated() bool {
	return !s.externalName && !s.headless && len(s.clusterIPs) == 0
}

// endpointSlice is what counts of a Kubernetes EndpointSlice.
type endpointSlice struct {
	service   string // label kubernetes.io/service-name; empty belongs to nobody
	endpoints []endpoint
}

// endpoint is one endpoint of a slice.
type endpoint struct {
	addrs    []netip.Addr
	ready    bool
	hostname string
	pod      string // name of the Pod it stands for, from targetRef; may be empty
}

// pod is what counts of a Kubernetes Pod.
type pod struct {
	labels    map[string]string
	hostname  string
	subdomain string
	addrs     []netip.Addr
	ready     bool
	gone      bool // finished or being deleted: never an endpoint
}

// serviceEntry is what counts of an Istio ServiceEntry.
type serviceEntry struct {
	hosts        []string
	addrs        []netip.Addr // single addresses, /32 and /128 included
	hasAddresses bool         // addresses were written, be they only CIDRs
	resolution   string
	noVIP        bool
	exportTo     exportTo
}

// exportTo says which namespaces see a host. The zero value is everyone.
type exportTo struct {
	restricted bool
	namespaces []string // sorted; only meaningful if restricted
}

// visibleIn reports whether a client in namespace sees the host.
func (e exportTo) visibleIn(namespace string) bool {
	if !e.restricted {
		return true
	}
	_, found := slices.BinarySearch(e.namespaces, namespace)
	return found
}
