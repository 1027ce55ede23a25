package nds_test

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/nds"
)

const (
	typeURL      = nds.TypeURL
	snapshotName = "istio.io/nds/full-snapshot"
)

// A table has the hosts of a NameTable.
type table map[string]*api.NameTable_NameInfo

// tables are the resources of a control plane, by name.
type tables map[string]table

// bytes returns the NameTable in wire form.
func (t table) bytes() []byte {
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(&api.NameTable{Table: t})
	if err != nil {
		panic(err) // a mistake in the test
	}
	return value
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// bodyOf returns a NameTable as the body of a resource.
func bodyOf(value []byte) *anypb.Any { return &anypb.Any{TypeUrl: typeURL, Value: value} }

// hashOf is the version of nametap-discovery's resources.
func hashOf(value []byte) string {
	sum := sha256.Sum256(value)
	return "nt:" + base64.RawStdEncoding.EncodeToString(sum[:8])
}

// worldOf returns a response in state-of-the-world form: a resource with a name, or without a body, is wrapped.
func worldOf(r *discoveryv3.DeltaDiscoveryResponse) *discoveryv3.DiscoveryResponse {
	world := &discoveryv3.DiscoveryResponse{VersionInfo: r.GetSystemVersionInfo(), TypeUrl: r.GetTypeUrl(), Nonce: r.GetNonce()}
	for _, resource := range r.GetResources() {
		body := resource.GetResource()
		if resource.GetName() != "" || body == nil {
			wrapped, err := anypb.New(resource)
			if err != nil {
				panic(err) // a mistake in the test
			}
			body = wrapped
		}
		world.Resources = append(world.Resources, body)
	}
	return world
}

// A model is a client as it should be. It follows the dialogue of a client with a control plane, checks what the client
// says, and has the table that the client should have.
type model struct {
	t      *testing.T
	stream int
	// have are the resources in use, by name or, in state-of-the-world without a name, by number.
	have map[string]used
	// announced are the versions in the first request of the stream.
	announced map[string]string
	pending   []answerable // the responses that are not answered
	version   string       // of the last accepted response, for state-of-the-world
	answers   int          // on the stream
	rejected  int          // since the start of the client
	missed    bool         // the last response was rejected
	// tables are the tables that the client should have had since the last check. unsure is true if there was a response
	// that the client may have applied or not.
	tables [][]string
	unsure bool
	ended  bool // a hash was wrong, so the stream ends
	frugal bool // the control plane sends no resource that the client has
	parsed map[[2]string]parsed
}

// A parsed is a NameTable: its entries in wire form, or an error.
type parsed struct {
	entries []string
	err     error
}

// A used is a resource in use.
type used struct {
	version string
	entries []string // as in parsed
}

// An answerable is a response of one of the variants, in incremental form.
type answerable struct {
	*discoveryv3.DeltaDiscoveryResponse
	world bool
}

// follow takes what was said.
func (m *model) follow(said []exchange) {
	m.t.Helper()
	for _, e := range said {
		if e.stream < m.stream {
			continue
		}
		switch message := e.Message.(type) {
		case *discoveryv3.DeltaDiscoveryRequest:
			if message.GetResponseNonce() == "" {
				m.greeted(message.GetNode(), "true", "1.32.0")
				m.begin(e.stream, message.GetInitialResourceVersions())
				continue
			}
			m.answer(message.GetResponseNonce(), message.GetErrorDetail().GetMessage())
		case *discoveryv3.DiscoveryRequest:
			if message.GetResponseNonce() == "" {
				m.greeted(message.GetNode(), "", "")
				m.begin(e.stream, m.announcement()) // this variant announces nothing
			} else {
				m.answer(message.GetResponseNonce(), message.GetErrorDetail().GetMessage())
			}
			if message.GetVersionInfo() != m.version {
				m.t.Errorf("a request with version %q, want %q", message.GetVersionInfo(), m.version)
			}
		case *discoveryv3.DeltaDiscoveryResponse:
			m.pending = append(m.pending, answerable{message, false})
		case *discoveryv3.DiscoveryResponse:
			m.pending = append(m.pending, answerable{incrementOf(message), true})
		}
	}
}

// greeted checks the node of a first request: what control planes look at before they send named resources.
func (m *model) greeted(node *corev3.Node, delta, version string) {
	m.t.Helper()
	fields := node.GetMetadata().GetFields()
	for key, want := range map[string]string{"DELTA_NDS": delta, "ISTIO_VERSION": version, "DNS_CAPTURE": "true"} {
		if got := fields[key].GetStringValue(); got != want {
			m.t.Errorf("the node has %s %q, want %q", key, got, want)
		}
	}
	if features := node.GetClientFeatures(); !slices.Equal(features, []string{"nametap.named-tables"}) {
		m.t.Errorf("the node has the features %q", features)
	}
}

// incrementOf returns a state-of-the-world response in incremental form; bare resources have their numbers as names.
func incrementOf(world *discoveryv3.DiscoveryResponse) *discoveryv3.DeltaDiscoveryResponse {
	r := &discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: world.GetVersionInfo(), TypeUrl: world.GetTypeUrl(), Nonce: world.GetNonce()}
	for i, body := range world.GetResources() {
		resource := &discoveryv3.Resource{}
		if !body.MessageIs(resource) || body.UnmarshalTo(resource) != nil {
			resource = &discoveryv3.Resource{Resource: body}
		}
		if resource.GetName() == "" {
			resource.Name = fmt.Sprint("\x00", i)
		}
		r.Resources = append(r.Resources, resource)
	}
	return r
}

// unnamed reports whether a resource has no name, also in the form of incrementOf.
func unnamed(name string) bool { return name == "" || name[0] == 0 }

// begin follows the first request of a stream. Responses that were not answered before may have been applied.
func (m *model) begin(stream int, announced map[string]string) {
	m.t.Helper()
	for len(m.pending) > 0 && !maps.Equal(m.announcement(), announced) {
		m.apply(m.pending[0])
		m.pending = m.pending[1:]
	}
	if want := m.announcement(); !maps.Equal(want, announced) {
		m.t.Errorf("stream %d announces %v, want %v", stream, announced, want)
	}
	m.unsure = m.unsure || len(m.pending) > 0
	m.stream, m.announced, m.pending = stream, announced, nil
	m.version, m.answers, m.ended = "", 0, false
}

// announcement returns what the first request of an incremental stream should announce.
func (m *model) announcement() map[string]string {
	versions := map[string]string{}
	for name, r := range m.have {
		if name != "" && r.version != "" {
			versions[name] = r.version
		}
	}
	return versions
}

// answer follows an ACK or, with a reason, a NACK.
func (m *model) answer(nonce, reason string) {
	m.t.Helper()
	if len(m.pending) == 0 {
		m.t.Errorf("an answer to nothing: %q, %q", nonce, reason)
		return
	}
	r := m.pending[0]
	m.pending = m.pending[1:]
	defer func() { m.answers++ }()
	fault := m.fault(r)
	if nonce != r.GetNonce() || (fault == "") != (reason == "") || !strings.Contains(reason, fault) {
		m.t.Errorf("the answer to %q is %q, %q; want %q, %q", r.GetNonce(), nonce, reason, r.GetNonce(), fault)
	}
	if m.missed = reason != ""; m.missed {
		m.rejected++
		m.ended = m.ended || strings.Contains(fault, "nt:")
		return
	}
	m.apply(r)
	m.version = r.GetSystemVersionInfo()
}

// fault returns what is wrong with a response: what the reason of the NACK contains; "" for nothing.
func (m *model) fault(r answerable) string {
	if r.GetTypeUrl() != typeURL {
		return r.GetTypeUrl()
	}
	seen := map[string]bool{}
	for _, resource := range r.GetResources() {
		body, version := resource.GetResource(), resource.GetVersion()
		if hash := hashOf(body.GetValue()); body != nil && strings.HasPrefix(version, "nt:") && version != hash {
			return fmt.Sprintf("resource %q has the hash %s, and its version is %s", resource.GetName(), hash, version)
		}
		var reason string
		switch err := m.parse(resource).err; {
		case seen[resource.GetName()]:
			reason = "it is in the response twice"
		case body != nil && body.GetTypeUrl() != typeURL:
			reason = fmt.Sprintf("type %q: want %q", body.GetTypeUrl(), typeURL)
		case unnamed(resource.GetName()) && err != nil:
			return err.Error()
		case err == nil:
			seen[resource.GetName()] = true
			continue
		}
		return fmt.Sprintf("resource %q (%d bytes): %s", resource.GetName(), len(body.GetValue()), reason)
	}
	return ""
}

// apply applies a response.
func (m *model) apply(r answerable) {
	if m.fault(r) != "" {
		return
	}
	next := map[string]used{}
	all, bodies := r.world, 0
	for _, resource := range r.GetResources() {
		all = all || resource.GetName() == snapshotName
		if resource.GetResource() != nil {
			bodies++
		}
	}
	if r.world && bodies == 0 && len(r.GetResources()) > 0 {
		return // heartbeats
	}
	for name, resource := range m.have {
		_, kept := m.announced[name]
		if !all && (m.answers > 0 || kept) {
			next[name] = resource
		}
	}
	for _, name := range r.GetRemovedResources() {
		delete(next, name)
	}
	for _, resource := range r.GetResources() {
		name := resource.GetName()
		switch {
		case name == snapshotName:
			continue
		case resource.GetResource() == nil:
			if before, ok := m.have[name]; ok {
				next[name] = before
			}
			continue
		case name == "":
			clear(next)
		default:
			delete(next, "")
		}
		if m.frugal && m.have[name].version == resource.GetVersion() {
			m.t.Errorf("the client has resource %q already", name)
		}
		next[name] = used{resource.GetVersion(), m.parse(resource).entries}
	}
	m.have = next
	m.tables = append(m.tables, m.union())
}

// parse returns the NameTable of a resource. Its name_info is the entry of the host that names the resource.
func (m *model) parse(r *discoveryv3.Resource) parsed {
	value := r.GetResource().GetValue()
	key := [2]string{r.GetName(), string(value)}
	if known, ok := m.parsed[key]; ok {
		return known
	}
	whole, p := &api.NameTable{}, parsed{}
	add := func(host string, info *api.NameTable_NameInfo) {
		p.entries = append(p.entries, string(table{host: info}.bytes()))
	}
	if p.err = proto.Unmarshal(value, whole); p.err == nil {
		for host, info := range whole.GetTable() {
			add(host, info)
		}
		if whole.GetNameInfo() != nil {
			add(r.GetName(), whole.GetNameInfo())
			if unnamed(r.GetName()) {
				p.err = errors.New("a name_info in a resource without the name of its host")
			}
		}
	}
	m.parsed[key] = p
	return p
}

// union returns the entries that the client should have, sorted. A host of several resources is there several times.
func (m *model) union() (union []string) {
	for _, r := range m.have {
		union = append(union, r.entries...)
	}
	slices.Sort(union)
	return union
}

// digest returns the checksum in the client's status, of the names and versions; "" if it is of the entries, in any order.
func (m *model) digest() string {
	sum := sha256.New()
	for _, name := range sortedKeys(m.have) {
		if unnamed(name) {
			return ""
		}
		fmt.Fprintf(sum, "%s %s\n", name, m.have[name].version)
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}
