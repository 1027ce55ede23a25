package fleet

import (
	"fmt"
	"net/netip"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api/digest"
)

// A Mode says in which form agents ask for tables.
type Mode string

// The modes.
const (
	Named Mode = "named" // nametap's agent: resources with names
	Plain Mode = "plain" // Istio's agent: one whole table
)

// node returns the node of the agent.
func (a *agent) node() *corev3.Node {
	namespace := a.namespace()
	ip := netip.AddrFrom4([4]byte{10, 128, byte(a.id >> 8), byte(a.id)})
	fields := map[string]string{
		"NAME": fmt.Sprintf("agent-%05d", a.id), "NAMESPACE": namespace, "INSTANCE_IPS": ip.String(), "CLUSTER_ID": "Kubernetes",
		"SERVICE_ACCOUNT": serviceAccount, "DNS_CAPTURE": "false", "DNS_AUTO_ALLOCATE": "false",
	}
	var features []string
	if a.fleet.cfg.Mode == Plain {
		fields["DNS_CAPTURE"] = "true"
	} else {
		features = []string{digest.NamedTables}
	}
	metadata := &structpb.Struct{Fields: make(map[string]*structpb.Value, len(fields))}
	for name, value := range fields {
		metadata.Fields[name] = structpb.NewStringValue(value)
	}
	return &corev3.Node{
		Id:       fmt.Sprintf("sidecar~%v~%s.%s~%[3]s.svc.cluster.local", ip, fields["NAME"], namespace),
		Metadata: metadata, UserAgentName: "nametap", ClientFeatures: features,
	}
}

// namespace returns the agent's namespace.
func (a *agent) namespace() string { return a.fleet.cfg.Namespaces[a.id%len(a.fleet.cfg.Namespaces)] }
