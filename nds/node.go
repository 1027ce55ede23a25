package nds

import (
	"cmp"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strconv"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api/digest"
)

// defaultClusterID is istiod's default name for the cluster in which it runs.
const defaultClusterID = "Kubernetes"

// Node describes the workload to the control plane, which selects the hosts of the table
// for this node.
type Node struct {
	// PodName and Namespace identify the workload; both are required.
	PodName   string
	Namespace string
	// IPs are the workload's addresses, at least one. The control plane sends only
	// addresses of the same families.
	IPs []netip.Addr
	// Domain is the workload's DNS domain; "" means NAMESPACE.svc.cluster.local.
	Domain string
	// ClusterID is the name by which the control plane knows the workload's cluster; ""
	// means Kubernetes.
	ClusterID string
	// ServiceAccount may be empty.
	ServiceAccount string
	// AutoAllocate requests automatic VIPs for hosts that have no address. Connections to these VIPs work only
	// through package egress, or a proxy such as Envoy. Without AutoAllocate, hosts that have no address are
	// missing from the table.
	AutoAllocate bool
	// Version is the version of the workload's agent, for display by control planes; it may be empty.
	Version string
	// Metadata is further node metadata; the fields of Node take precedence. It may be
	// nil.
	Metadata map[string]any
	// Labels are the workload's labels; Sidecar resources select workloads by them. It may
	// be nil.
	Labels map[string]string
}

// withDefaults returns n with defaults for the zero values, or an error that names the
// invalid field.
func (n Node) withDefaults() (Node, error) {
	n.Domain = cmp.Or(n.Domain, n.Namespace+".svc.cluster.local")
	for _, field := range []struct{ name, flag, value string }{
		{"pod name", "--pod-name", n.PodName}, {"namespace", "--namespace", n.Namespace}, {"domain", "--domain", n.Domain},
	} {
		switch {
		case field.value == "":
			return n, fmt.Errorf("%s is empty: want the %[1]s of the workload (%[2]s)", field.name, field.flag)
		case strings.ContainsAny(field.value, "~/ \t\r\n"): // "~" separates the parts of the node id
			return n, fmt.Errorf("%s %q: want a DNS name (%s)", field.name, field.value, field.flag)
		}
	}
	if strings.Contains(n.Namespace, ".") {
		return n, fmt.Errorf("namespace %q: want a name without a dot (--namespace)", n.Namespace)
	}
	if len(n.IPs) == 0 {
		return n, fmt.Errorf("no IP address given for pod %q: want at least one (--instance-ip)", n.PodName)
	}
	for _, ip := range n.IPs {
		if !ip.IsValid() {
			return n, fmt.Errorf("an invalid IP address given for pod %q (--instance-ip)", n.PodName)
		}
	}
	n.ClusterID = cmp.Or(n.ClusterID, defaultClusterID)
	return n, nil
}

// proto returns the node for the first request of a stream. It returns an error if a string is
// not UTF-8, because protobuf cannot hold such strings.
func (n Node) proto() (*corev3.Node, error) {
	ips := make([]string, len(n.IPs))
	for i, ip := range n.IPs {
		ips[i] = ip.Unmap().WithZone("").String()
	}
	// istiod refuses JSON booleans in node metadata, so booleans are sent as strings.
	metadata := maps.Clone(n.Metadata)
	if metadata == nil {
		metadata = map[string]any{}
	}
	maps.Copy(metadata, map[string]any{
		"NAME":         n.PodName,
		"NAMESPACE":    n.Namespace,
		"INSTANCE_IPS": strings.Join(ips, ","),
		"CLUSTER_ID":   n.ClusterID,
		// istiod's older VIP allocator reads both keys. Its newer VIP allocator reads only
		// the first key, and sends automatic VIPs to every node that captures DNS.
		"DNS_CAPTURE":       strconv.FormatBool(n.AutoAllocate),
		"DNS_AUTO_ALLOCATE": strconv.FormatBool(n.AutoAllocate),
	})
	delete(metadata, metaDelta) // see incrementalNode
	if n.ServiceAccount != "" {
		metadata["SERVICE_ACCOUNT"] = n.ServiceAccount
	}
	if len(n.Labels) > 0 {
		labels := make(map[string]any, len(n.Labels))
		for key, value := range n.Labels {
			labels[key] = value
		}
		metadata["LABELS"] = labels
	}
	fields, err := structpb.NewStruct(metadata)
	if err != nil {
		return nil, fmt.Errorf("node metadata of pod %q: %w", n.PodName, err)
	}
	node := &corev3.Node{
		Id:            n.ID(),
		Metadata:      fields,
		UserAgentName: "nametap",
		// nametap-discovery sends parts of the table only to clients with this feature.
		ClientFeatures: []string{digest.NamedTables},
	}
	if n.Version != "" {
		node.UserAgentVersionType = &corev3.Node_UserAgentVersion{UserAgentVersion: n.Version}
	}
	return node, nil
}

// ID returns the id by which the control plane knows the node. The node must have an address.
func (n Node) ID() string {
	return "sidecar~" + n.IPs[0].Unmap().WithZone("").String() + "~" + n.PodName + "." + n.Namespace + "~" + n.Domain
}

// metaDelta is the field of the node metadata by which a client asks istiod for its incremental form of the table:
// a resource for each host. istiod sends it from version 1.32 on, to clients that say that they have this version.
const metaDelta = "DELTA_NDS"

// incrementalNode returns node for the incremental variant: with the metadata for istiod's incremental form, which the
// client can read, whatever the settings of the user.
func incrementalNode(node *corev3.Node) *corev3.Node {
	node = proto.CloneOf(node)
	maps.Copy(node.GetMetadata().GetFields(), map[string]*structpb.Value{
		metaDelta: structpb.NewStringValue("true"), "ISTIO_VERSION": structpb.NewStringValue("1.32.0"),
	})
	return node
}

// spiffePath returns the path of the node's SPIFFE ID.
func (n Node) spiffePath() string {
	return "/ns/" + n.Namespace + "/sa/" + cmp.Or(n.ServiceAccount, "default")
}

// checkCertificate returns an error if a certificate has expired or does not have the SPIFFE ID of the node.
func (n Node) checkCertificate(leaf *x509.Certificate) error {
	if err := checkDates("the certificate", time.Time{}, leaf.NotAfter); err != nil {
		return err
	}
	var identities []string
	for _, uri := range leaf.URIs {
		if id, err := spiffeid.FromURI(uri); err == nil && id.Path() == n.spiffePath() {
			return nil
		}
		identities = append(identities, uri.String())
	}
	if len(identities) == 0 {
		return errors.New("the certificate has no SPIFFE ID")
	}
	return fmt.Errorf("the certificate is for %s, and this node is %s: see --namespace and --service-account",
		strings.Join(identities, ", "), n.spiffePath())
}
