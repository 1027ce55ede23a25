// Package object is the model that all sources of the control plane share: the fields of
// Kubernetes and Istio objects that decide about names. Each source decodes what it reads into
// these types, so the tables do not depend on where an object is from.
//
// An object does not change after its source has passed it to the control plane.
package object

import (
	"cmp"
	"fmt"
	"net/netip"
	"time"
)

// The kinds of objects that are read. All others are skipped.
const (
	KindService       = "Service"
	KindEndpointSlice = "EndpointSlice"
	KindPod           = "Pod"
	KindServiceEntry  = "ServiceEntry"
	KindSidecar       = "Sidecar"
	KindServiceImport = "ServiceImport"
	KindNamespace     = "Namespace"
	KindConfigMap     = "ConfigMap" // with the settings of the mesh; read at the API server only
	KindCluster       = "Cluster"   // what identifies the own cluster; read at the API server only
)

// MaxInTables bounds how many bytes of a table all hosts of one ServiceEntry may need. In a table, each host of a
// ServiceEntry has all addresses, and each port may have all endpoints, so an object of 1 MiB could need 1 GiB. Istio's
// definition of the resource permits 256 hosts with 256 addresses; they need less than MaxInTables.
const MaxInTables = 4 << 20

// Labels, annotations and values of fields.
const (
	LabelServiceName     = "kubernetes.io/service-name"                 // of an EndpointSlice
	LabelImport          = "multicluster.kubernetes.io/service-name"    // of an EndpointSlice of a ServiceImport
	LabelSourceCluster   = "multicluster.kubernetes.io/source-cluster"  // of such an EndpointSlice
	LabelNetwork         = "topology.istio.io/network"                  // of the root namespace
	LabelAutoAllocate    = "networking.istio.io/enable-autoallocate-ip" // of a ServiceEntry
	AnnotationScope      = "nametap.dev/headless-scope"                 // of a headless Service
	AnnotationExportTo   = "networking.istio.io/exportTo"               // of a Service
	ClusterIPNone        = "None"                                       // of a headless Service
	ResolutionNone       = "NONE"                                       // of a ServiceEntry
	ResolutionDynamic    = "DYNAMIC_DNS"
	ResolutionStatic     = "STATIC"
	ResolutionDNS        = "DNS"
	ResolutionRoundRobin = "DNS_ROUND_ROBIN"
	ImportClusterSetIP   = "ClusterSetIP" // type of a ServiceImport
	ImportHeadless       = "Headless"
)

// Key identifies an object.
type Key struct {
	Kind, Namespace, Name string
}

// String returns "KIND NAMESPACE/NAME".
func (k Key) String() string { return fmt.Sprintf("%s %s/%s", k.Kind, k.Namespace, k.Name) }

// Compare orders keys by kind, namespace and name.
func (k Key) Compare(other Key) int {
	return cmp.Or(cmp.Compare(k.Kind, other.Kind), cmp.Compare(k.Namespace, other.Namespace), cmp.Compare(k.Name, other.Name))
}

// Object is a decoded object. Exactly one of the fields after Key is set.
type Object struct {
	Key Key

	Service   *Service
	Slice     *EndpointSlice
	Pod       *Pod
	Entry     *ServiceEntry
	Import    *ServiceImport
	Sidecar   *Sidecar
	Namespace *Namespace
	Mesh      *Mesh
	Cluster   *Cluster
}

// Cluster identifies a cluster by the UID of its namespace kube-system, which never changes.
type Cluster struct{ UID string }

// Namespace holds the fields of the root namespace of a cluster that are used.
type Namespace struct {
	Network string // of the cluster's endpoints, from [LabelNetwork]; empty if it is not known
}

// Service holds the fields of a Kubernetes Service that are used.
type Service struct {
	ExternalName    string // the host that a Service of type ExternalName stands for, without a trailing dot
	Headless        bool
	ClusterIPs      []netip.Addr
	Ports           Ports    // for a headless Service, the ports of the Pods that it selects, if their numbers are known
	Numbers         []uint16 // of the ports that clients connect to, for [Egress.Shows]
	Selector        map[string]string
	PublishNotReady bool
	ClusterOnly     bool // only clients of the same cluster get the endpoints of a headless Service, from [AnnotationScope]
	ExportTo        ExportTo
}

// EndpointSlice holds the fields of a Kubernetes EndpointSlice that are used.
type EndpointSlice struct {
	Service   string // from [LabelServiceName]; empty for no Service
	Import    string // the name of its ServiceImport, from [LabelImport]; empty for none
	Cluster   string // of the endpoints of a ServiceImport, from [LabelSourceCluster]; empty if it is no label of a DNS name
	Ports     Ports  // of all endpoints
	Endpoints []Endpoint
}

// ServiceImport holds the fields of a ServiceImport of the Multi-Cluster Services API that are used.
type ServiceImport struct {
	Headless bool
	IPs      []netip.Addr
	Ports    Ports    // of the Service; a headless Service's slices have the endpoints' ports
	Numbers  []uint16 // of the ports that clients connect to, for [Egress.Shows]
}

// Endpoint is one endpoint of a slice.
type Endpoint struct {
	Addrs    []netip.Addr
	Ready    bool
	Hostname string
	Pod      string // name of its Pod, from targetRef; may be empty
}

// Pod holds the fields of a Kubernetes Pod that are used. Pods are read from directories only:
// EndpointSlices of the API server have the hostnames of Pods.
type Pod struct {
	Labels     map[string]string
	Hostname   string
	Subdomain  string
	Addrs      []netip.Addr
	Ready      bool
	Terminated bool // finished or being deleted, so never an endpoint
}

// ServiceEntry holds the fields of an Istio ServiceEntry that are used.
type ServiceEntry struct {
	Hosts        []string
	Addrs        []netip.Addr // single addresses that clients can connect to, /32 and /128 included
	HasAddresses bool         // there are addresses, even if they are only CIDRs
	Resolution   string
	NoVIP        bool
	// Selector selects the Pods that are the endpoints. It is set only with resolution NONE: with others, connections
	// lead to the endpoints, and clients get other addresses.
	Selector     map[string]string
	Numbers      []uint16  // of the ports that clients connect to
	Created      time.Time // the creationTimestamp; the zero time if there is none, as in most directories
	ExportTo     ExportTo
	Destinations Destinations // where connections to Hosts lead
	// VIPs are the automatic VIPs that istiod has written to the status, by the host in the spelling of Hosts. There may be
	// other hosts, too, because the status may be older than the spec.
	VIPs map[string][]netip.Addr
}
