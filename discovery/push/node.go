package push

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/clip"
)

// The keys of node metadata that this package reads. Booleans are strings, as istiod requires.
const (
	metaNamespace    = "NAMESPACE"
	metaIPs          = "INSTANCE_IPS"
	metaDNSCapture   = "DNS_CAPTURE"
	metaAutoAllocate = "DNS_AUTO_ALLOCATE"
	metaLabels       = "LABELS"
	metaCluster      = "CLUSTER_ID"
	metaNetwork      = "NETWORK"
	metaIstioVersion = "ISTIO_VERSION"
)

// A subscriber has what the first request says of its client. The Sidecar and the Place of the view
// are not set yet, because they depend on the objects. A subscriber never changes.
type subscriber struct {
	node             string // the id
	name             string // of the pod, or of the host of a VM
	software         string // its name and version; may be empty
	view             hosts.View
	labels           hosts.Labels
	cluster, network string // where the client says that it is; may be empty
	named            bool   // it takes tables as resources with names
}

// Bounds, in bytes, of texts that are kept as long as the client's stream. The bounds of names and
// labels are Kubernetes' bounds.
const (
	maxName     = 253
	maxLabel    = 63
	maxNodeID   = len("sidecar~~.~") + len("0000:0000:0000:0000:0000:ffff:255.255.255.255") + maxName + maxLabel + maxName
	maxSoftware = 64
	// maxLabels bounds the number of labels.
	maxLabels = 256
)

// parseNode returns what a node says of its client. The node id has Istio's form:
// sidecar~<ip>~<pod>.<namespace>~<domain>. parseNode refuses what istiod refuses, so a client that works with
// nametap-discovery also works with istiod.
func parseNode(node *corev3.Node) (subscriber, error) {
	if node.GetId() == "" {
		return subscriber{}, refuse("the first request carries no node id: want sidecar~<ip>~<pod>.<namespace>~<domain>")
	}
	parts := strings.Split(node.GetId(), "~")
	if len(parts) != 4 || parts[0] == "" || len(node.GetId()) > maxNodeID {
		return subscriber{}, refuse("node id %q: want sidecar~<ip>~<pod>.<namespace>~<domain>, at most %d bytes", cut(node.GetId()), maxNodeID)
	}
	meta := metadata{fields: node.GetMetadata().GetFields()}
	v := hosts.View{Namespace: meta.str(metaNamespace)}
	// Connections to an automatic VIP work only through a proxy. A client that has a proxy asks for VIPs.
	captures, asks := meta.flag(metaDNSCapture, true), meta.flag(metaAutoAllocate, false)
	v.VIPs = captures && asks
	if v.Namespace == "" {
		// The name of a pod may contain dots, the name of a namespace may not.
		if i := strings.LastIndexByte(parts[2], '.'); i >= 0 {
			v.Namespace = parts[2][i+1:]
		}
	}
	ips, labels := meta.str(metaIPs), meta.labels()
	cluster, network := meta.name(metaCluster), meta.name(metaNetwork)
	if meta.err != nil {
		return subscriber{}, meta.err
	}
	if v.Namespace == "" {
		return subscriber{}, refuse("node %q has no namespace: neither metadata %s nor <pod>.<namespace> in the id",
			cut(node.GetId()), metaNamespace)
	}
	if !object.IsLabel(v.Namespace) {
		return subscriber{}, refuse("node %q is of namespace %q: want a name of Kubernetes, at most %d bytes", cut(node.GetId()), cut(v.Namespace), maxLabel)
	}
	var ok bool
	if v.Families, ok = familiesOf(ips + "," + parts[1]); !ok {
		return subscriber{}, refuse("node %q has no IP address: neither metadata %s nor the id gives one", cut(node.GetId()), metaIPs)
	}
	return subscriber{
		node: node.GetId(), name: strings.TrimSuffix(parts[2], "."+v.Namespace), software: software(node), view: v, labels: labels, cluster: cluster, network: network,
		named: slices.Contains(node.GetClientFeatures(), digest.NamedTables),
	}, nil
}

// software returns the name and the version of the program of a client. Istio's agent sends the
// name and version of its Envoy, and its own version as metadata. The text is only shown, so no text
// is refused.
func software(node *corev3.Node) string {
	name, version := node.GetUserAgentName(), node.GetUserAgentVersion()
	if own := node.GetMetadata().GetFields()[metaIstioVersion].GetStringValue(); version == "" && own != "" {
		name, version = "istio", own
	}
	text := strings.TrimSpace(name + " " + version)
	return strings.Clone(text[:min(len(text), maxSoftware)])
}

// familiesOf returns the families in a comma-separated list of addresses. It ignores
// loopback, link-local and unspecified addresses, because they do not show what a client
// can reach. If there are no other addresses, the client gets both families. It reports false if
// there is no address at all.
func familiesOf(list string) (hosts.Families, bool) {
	var f hosts.Families
	found := false
	for s := range strings.SplitSeq(list, ",") {
		a, err := netip.ParseAddr(strings.TrimSpace(s))
		if err != nil {
			continue
		}
		found = true
		if a = a.Unmap(); !a.IsGlobalUnicast() {
			continue
		}
		f.V4, f.V6 = f.V4 || a.Is4(), f.V6 || a.Is6()
	}
	if f == (hosts.Families{}) {
		f = hosts.Families{V4: true, V6: true}
	}
	return f, found
}

// metadata reads node metadata and records the first error.
type metadata struct {
	fields map[string]*structpb.Value
	err    error
}

func (m *metadata) str(name string) string {
	value, ok := m.fields[name]
	if !ok {
		return ""
	}
	s, ok := value.GetKind().(*structpb.Value_StringValue)
	if !ok {
		m.fail(name, "want a string, got %q", cut(value.String()))
		return ""
	}
	return s.StringValue
}

// fail records an error in the metadata with a key, unless there was one before.
func (m *metadata) fail(key, format string, args ...any) {
	if m.err == nil {
		m.err = refuse("node metadata %s: %s", cut(key), fmt.Sprintf(format, args...))
	}
}

// name returns a text that is kept as long as the stream lives, so its length is bounded.
func (m *metadata) name(key string) string {
	text := m.str(key)
	if len(text) > maxName {
		m.fail(key, "want at most %d bytes, got %d", maxName, len(text))
	}
	return text
}

// labels returns the labels. In the metadata they are an object whose values are strings.
func (m *metadata) labels() hosts.Labels {
	fields := m.fields[metaLabels].GetStructValue().GetFields()
	if value, ok := m.fields[metaLabels]; ok && value.GetStructValue() == nil {
		m.fail(metaLabels, "want an object, got %q", cut(value.String()))
	}
	if len(fields) > maxLabels {
		m.fail(metaLabels, "want at most %d labels, got %d", maxLabels, len(fields))
	}
	if m.err != nil {
		return nil
	}
	values := metadata{fields: fields}
	out := make(map[string]string, len(fields))
	for key := range fields {
		out[key] = values.str(key)
		if len(key) > maxName+len("/")+maxLabel || len(out[key]) > maxLabel {
			m.fail(metaLabels, "%q=%q: want at most %d/%d bytes and a value of %d bytes", cut(key), cut(out[key]), maxName, maxLabel, maxLabel)
		}
	}
	if values.err != nil && m.err == nil {
		m.err = values.err
	}
	return hosts.NewLabels(out)
}

func (m *metadata) flag(name string, fallback bool) bool {
	if _, ok := m.fields[name]; !ok {
		return fallback
	}
	return m.str(name) == "true"
}

func refuse(format string, args ...any) error {
	return status.Errorf(codes.InvalidArgument, format, args...)
}

// maxForeign bounds, in bytes, a client's text in a line of the log or in an error.
const maxForeign = 256

// cut returns a client's text for a line of the log or an error.
func cut(text string) string { return clip.Text(text, maxForeign) }
