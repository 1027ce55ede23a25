package nds

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strconv"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/proto"
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
	// AutoAllocate asks for automatic VIPs, which lead somewhere only through a
	// proxy such as Envoy. Without it a host that has no address of its own is
	// not in the table.
	AutoAllocate bool
	// Metadata is what else the control plane is told, by the keys of node metadata;
	// the fields of Node win over it. May be nil.
	Metadata map[string]any
	// Labels are the workload's; they select Sidecar resources. May be nil.
	Labels map[string]string
}

// errNodeChanged ends a stream whose node is no longer what it was at the connect.
var errNodeChanged = errors.New("the addresses or labels of this node have changed")

const (
	// nodePoll is how often the node is looked at again without a sign that it
	// changed.
	nodePoll = 10 * time.Second
	// nodeSettle is how long the node is left alone after a sign: addresses of
	// several families and interfaces come one after the other.
	nodeSettle = time.Second
)

// currentNode returns the node of this moment.
func (c *Client) currentNode() (*corev3.Node, error) {
	node := c.cfg.Node
	if c.cfg.Refresh != nil {
		var err error
		if node, err = c.cfg.Refresh(node); err == nil {
			node, err = node.withDefaults()
		}
		if err != nil {
			return nil, fmt.Errorf("finding out the addresses and labels of this node: %w", err)
		}
	}
	return node.proto()
}

// awaitChange returns true once the node is known and is not told, and false when
// ctx ends before that.
func (c *Client) awaitChange(ctx context.Context, told *corev3.Node) bool {
	if c.cfg.Refresh == nil {
		<-ctx.Done()
		return false
	}
	timer := time.NewTimer(nodePoll)
	defer timer.Stop()
	settling := false // more signs do not put the look off
	for {
		select {
		case <-ctx.Done():
			return false
		case <-c.cfg.Changed:
			if !settling {
				timer.Reset(nodeSettle)
			}
			settling = true
			continue
		case <-timer.C:
			timer.Reset(nodePoll)
			settling = false
		}
		// An error is for the next connect to report; the stream that stands is
		// better than none.
		if node, err := c.currentNode(); err == nil && !proto.Equal(node, told) {
			return true
		}
	}
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
	metadata := maps.Clone(n.Metadata)
	if metadata == nil {
		metadata = map[string]any{}
	}
	maps.Copy(metadata, map[string]any{
		"NAME":         n.PodName,
		"NAMESPACE":    n.Namespace,
		"INSTANCE_IPS": strings.Join(ips, ","),
		"CLUSTER_ID":   n.ClusterID,
		// istiod's older allocator looks at both, the newer one at the first alone:
		// it sends automatic VIPs to every node that says that it captures DNS.
		"DNS_CAPTURE":       strconv.FormatBool(n.AutoAllocate),
		"DNS_AUTO_ALLOCATE": strconv.FormatBool(n.AutoAllocate),
		"NAMETAP_MERGE":     "true", // several named resources are welcome
	})
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
