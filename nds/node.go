package nds

import (
	"fmt"
	"net/netip"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// defaultClusterID is what istiod calls the cluster it runs in unless it is
// told another name.
const defaultClusterID = "Kubernetes"

// Node is what the control plane is told of the workload. It decides which
// hosts the table holds.
type Node struct {
	// PodName and Namespace name the workload; both are required.
	PodName   string
	Namespace string
	// IPs are the workload's addresses, at least one. Without an IPv6 address
	// the control plane sends none, and likewise IPv4.
	IPs []netip.Addr
	// Domain is the workload's DNS domain; "" means
	// NAMESPACE.svc.cluster.local.
	Domain string
	// ClusterID is the control plane's name for the workload's cluster; ""
	// means Kubernetes.
	ClusterID string
	// ServiceAccount may be empty.
	ServiceAccount string
	// Labels are the workload's; they select Sidecar resources. May be nil.
	Labels map[string]string
}

// withDefaults returns n with the zero values replaced by what they mean, or
// says which field is wrong.
func (n Node) withDefaults() (Node, error) {
	for _, field := range []struct{ name, value string }{{"pod name", n.PodName}, {"namespace", n.Namespace}} {
		if field.value == "" {
			return n, fmt.Errorf("%s is empty: want the workload's", field.name)
		}
	}
	if strings.Contains(n.Namespace, ".") {
		return n, fmt.Errorf("namespace %q: want a name without a dot", n.Namespace)
	}
	if n.Domain == "" {
		n.Domain = n.Namespace + ".svc.cluster.local"
	}
	for _, field := range []struct{ name, value string }{{"pod name", n.PodName}, {"namespace", n.Namespace}, {"domain", n.Domain}} {
		// "~" separates the parts of the id.
		if strings.ContainsAny(field.value, "~/ \t\r\n") {
			return n, fmt.Errorf("%s %q: want a DNS name", field.name, field.value)
		}
	}
	if len(n.IPs) == 0 {
		return n, fmt.Errorf("no IP address given for pod %q: want at least one", n.PodName)
	}
	for _, ip := range n.IPs {
		if !ip.IsValid() {
			return n, fmt.Errorf("an invalid IP address given for pod %q", n.PodName)
		}
	}
	if n.ClusterID == "" {
		n.ClusterID = defaultClusterID
	}
	return n, nil
}

// proto returns the node as it stands in the first request of a stream. Strings
// that are not UTF-8 are an error, since they cannot be sent.
func (n Node) proto() (*corev3.Node, error) {
	ips := make([]string, len(n.IPs))
	for i, ip := range n.IPs {
		ips[i] = ip.Unmap().WithZone("").String()
	}
	// istiod refuses JSON booleans here: what looks like one is a string.
	metadata := map[string]any{
		"NAME":              n.PodName,
		"NAMESPACE":         n.Namespace,
		"INSTANCE_IPS":      strings.Join(ips, ","),
		"CLUSTER_ID":        n.ClusterID,
		"DNS_CAPTURE":       "true", // or no automatic VIPs are sent
		"DNS_AUTO_ALLOCATE": "true", // the same for istiod's older allocator
		"NAMETAP_MERGE":     "true", // several named resources are welcome
	}
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
	return &corev3.Node{
		Id:            "sidecar~" + ips[0] + "~" + n.PodName + "." + n.Namespace + "~" + n.Domain,
		Metadata:      fields,
		UserAgentName: "nametap",
	}, nil
}
