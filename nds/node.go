package nds

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
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

	"github.com/nametap/nametap/internal/clock"
)

// defaultClusterID is the name that istiod gives to the cluster it runs in unless it is
// configured otherwise.
const defaultClusterID = "Kubernetes"

// Node describes the workload to the control plane, which selects the hosts of the table
// by it.
type Node struct {
	// PodName and Namespace identify the workload; both are required.
	PodName   string
	Namespace string
	// IPs are the workload's addresses, at least one. The control plane sends only
	// addresses of the families that occur here.
	IPs []netip.Addr
	// Domain is the workload's DNS domain; "" means NAMESPACE.svc.cluster.local.
	Domain string
	// ClusterID is the control plane's name of the workload's cluster; "" means
	// Kubernetes.
	ClusterID string
	// ServiceAccount may be empty.
	ServiceAccount string
	// AutoAllocate asks for automatic VIPs. Connections to them work only through package
	// egress, or a proxy such as Envoy. Without it, the table does not hold hosts that have no address.
	AutoAllocate bool
	// Version is the version of the workload's agent, which control planes show; it may be empty.
	Version string
	// Metadata is further node metadata; the fields of Node take precedence. It may be
	// nil.
	Metadata map[string]any
	// Labels are the workload's labels; Sidecar resources select workloads by them. It may
	// be nil.
	Labels map[string]string
}

var (
	// errNodeChanged ends a stream after the node has changed.
	errNodeChanged = errors.New("the addresses or labels of this node have changed")
	// errResumed ends a stream after the machine was suspended. The peer, or a NAT on the way,
	// has usually forgotten the connection; pings would notice that after up to 30 s, since the
	// timers stand still in a suspend.
	errResumed = errors.New("this machine was suspended")
)

const (
	// nodeInterval is how often the node is checked without a signal on Config.Changed.
	nodeInterval = 12 * clock.Tick
	// nodeSettle is how long after a signal the node is checked: the addresses of several
	// families and interfaces change one after the other.
	nodeSettle = time.Second

	// briefSleep is the length of the shortest suspend that a connection does not outlive.
	briefSleep = 10 * time.Second
)

// currentNode returns the node as it is now.
func (c *Client) currentNode() (*corev3.Node, error) {
	node := c.cfg.Node
	if c.cfg.Refresh != nil {
		var err error
		if node, err = c.cfg.Refresh(node); err == nil {
			node, err = node.withDefaults()
		}
		if err != nil {
			return nil, fmt.Errorf("reading the addresses and labels of this node: %w", err)
		}
	}
	return node.proto()
}

// The fields of the node metadata by which a client asks for changes of hosts (api/nds.proto).
const (
	metadataMerge    = "NAMETAP_MERGE"
	metadataHosts    = "NAMETAP_HOSTS"
	metadataRevision = "NAMETAP_REVISION"
)

// fingerprint returns the same text for nodes that say the same of themselves. The version of the agent does not count: what a
// node is sent does not depend on it, and a snapshot outlives an upgrade.
func fingerprint(node *corev3.Node) string {
	of := &corev3.Node{Id: node.GetId(), Metadata: node.GetMetadata(), UserAgentName: node.GetUserAgentName()}
	data, _ := proto.MarshalOptions{Deterministic: true}.Marshal(of) // its strings are UTF-8
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// awaitChange returns errNodeChanged when the node differs from sent, errResumed when the
// machine was suspended, and nil when ctx ends before that.
func (c *Client) awaitChange(ctx context.Context, sent *corev3.Node) error {
	resumed, stopResumed := c.cfg.Clock.Poll(clock.Tick, func() bool { return c.cfg.Clock.Slept()-c.slept >= briefSleep })
	defer stopResumed()
	recheck, stopRecheck := c.cfg.Clock.Poll(nodeInterval, func() bool { return true })
	defer stopRecheck()
	var settled <-chan time.Time // set between a signal and its check: further signals do not delay that
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-resumed:
			return errResumed
		case <-c.cfg.Changed:
			if settled == nil {
				settled = time.After(nodeSettle)
			}
			continue
		case <-settled:
			settled = nil
		case <-recheck:
		}
		// The next connect reports an error; until then the open stream is better than none.
		if node, err := c.currentNode(); err == nil && !proto.Equal(node, sent) {
			return errNodeChanged
		}
	}
}

// withDefaults returns n with defaults for the zero values, or an error that names the
// invalid field.
func (n Node) withDefaults() (Node, error) {
	for _, field := range []struct{ name, flag, value string }{
		{"pod name", "--pod-name", n.PodName}, {"namespace", "--namespace", n.Namespace},
	} {
		if field.value == "" {
			return n, fmt.Errorf("%s is empty: want the %[1]s of the workload (%[2]s)", field.name, field.flag)
		}
	}
	if strings.Contains(n.Namespace, ".") {
		return n, fmt.Errorf("namespace %q: want a name without a dot (--namespace)", n.Namespace)
	}
	if n.Domain == "" {
		n.Domain = n.Namespace + ".svc.cluster.local"
	}
	for _, field := range []struct{ name, flag, value string }{
		{"pod name", "--pod-name", n.PodName}, {"namespace", "--namespace", n.Namespace}, {"domain", "--domain", n.Domain},
	} {
		// "~" separates the parts of the node id.
		if strings.ContainsAny(field.value, "~/ \t\r\n") {
			return n, fmt.Errorf("%s %q: want a DNS name (%s)", field.name, field.value, field.flag)
		}
	}
	if len(n.IPs) == 0 {
		return n, fmt.Errorf("no IP address given for pod %q: want at least one (--instance-ip)", n.PodName)
	}
	for _, ip := range n.IPs {
		if !ip.IsValid() {
			return n, fmt.Errorf("an invalid IP address given for pod %q (--instance-ip)", n.PodName)
		}
	}
	if n.ClusterID == "" {
		n.ClusterID = defaultClusterID
	}
	return n, nil
}

// proto returns the node for the first request of a stream. It fails for strings that are
// not UTF-8, because protobuf cannot hold them.
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
		// istiod's older VIP allocator reads both keys. The newer one reads only the
		// first, and sends automatic VIPs to every node that captures DNS.
		"DNS_CAPTURE":       strconv.FormatBool(n.AutoAllocate),
		"DNS_AUTO_ALLOCATE": strconv.FormatBool(n.AutoAllocate),
		metadataMerge:       "hosts",
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
	node := &corev3.Node{
		Id:            "sidecar~" + ips[0] + "~" + n.PodName + "." + n.Namespace + "~" + n.Domain,
		Metadata:      fields,
		UserAgentName: "nametap",
	}
	if n.Version != "" {
		node.UserAgentVersionType = &corev3.Node_UserAgentVersion{UserAgentVersion: n.Version}
	}
	return node, nil
}
