package discovery

import (
	"fmt"
	"net/netip"
	"slices"
)

// The kinds of objects that are read. All others are skipped.
const (
	kindService       = "Service"
	kindEndpointSlice = "EndpointSlice"
	kindPod           = "Pod"
	kindServiceEntry  = "ServiceEntry"
)

// DocumentError is an error in a document of the configuration directory, or in the
// directory itself. The object is left out, or stays in use in its last good form if it
// has one.
type DocumentError struct {
	File  string `json:"file"`            // path below the configuration directory
	Line  int    `json:"line,omitempty"`  // from 1; 0 for the whole file
	Field string `json:"field,omitempty"` // "spec.clusterIP"; empty if the error is not about a field
	Msg   string `json:"message"`
	Kept  bool   `json:"kept,omitempty"` // the last good form of the object is in use

	object key // the object, as far as known
}

// Error returns "file:line: field: message".
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

// key identifies an object.
type key struct {
	kind, namespace, name string
}

func (k key) String() string { return fmt.Sprintf("%s %s/%s", k.kind, k.namespace, k.name) }

// object is a decoded object. Exactly one of the last four fields is set.
type object struct {
	key  key
	file string
	line int
	text *chunk // the document that holds it

	service *service
	slice   *endpointSlice
	pod     *pod
	entry   *serviceEntry
}

// service holds the fields of a Kubernetes Service that are used.
type service struct {
	externalName    bool
	headless        bool
	clusterIPs      []netip.Addr
	selector        map[string]string
	publishNotReady bool
	exportTo        exportTo
}

// unallocated reports whether the Service has no address yet. In a cluster the API server
// allocates one.
func (s *service) unallocated() bool {
	return !s.externalName && !s.headless && len(s.clusterIPs) == 0
}

// endpointSlice holds the fields of a Kubernetes EndpointSlice that are used.
type endpointSlice struct {
	service   string // label kubernetes.io/service-name; empty for no Service
	endpoints []endpoint
}

// endpoint is one endpoint of a slice.
type endpoint struct {
	addrs    []netip.Addr
	ready    bool
	hostname string
	pod      string // name of its Pod, from targetRef; may be empty
}

// pod holds the fields of a Kubernetes Pod that are used.
type pod struct {
	labels     map[string]string
	hostname   string
	subdomain  string
	addrs      []netip.Addr
	ready      bool
	terminated bool // finished or being deleted, so never an endpoint
}

// serviceEntry holds the fields of an Istio ServiceEntry that are used.
type serviceEntry struct {
	hosts        []string
	addrs        []netip.Addr // single addresses, /32 and /128 included
	hasAddresses bool         // there are addresses, even if they are only CIDRs
	resolution   string
	noVIP        bool
	exportTo     exportTo
}

// exportTo says which namespaces see a host. The zero value means all.
type exportTo struct {
	restricted bool
	namespaces []string // sorted; only meaningful if restricted
}

// visibleIn reports whether clients in a namespace see the host.
func (e exportTo) visibleIn(namespace string) bool {
	if !e.restricted {
		return true
	}
	_, found := slices.BinarySearch(e.namespaces, namespace)
	return found
}
