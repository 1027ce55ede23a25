package agent_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/miekg/dns"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

// pushChange sends a change with the hosts of table, after which these entries are in use, and waits
// until they are.
func pushChange(t *testing.T, control *fakexds.Server, table *api.NameTable, entries ...[]byte) {
	t.Helper()
	version := string(table.GetChange().GetRevision())
	var sum digest.Sum
	for _, raw := range entries {
		sum = sum.Add(digest.Of(raw))
	}
	table.Change.Sum = sum.Bytes()
	value, err := proto.MarshalOptions{Deterministic: true}.Marshal(table)
	if err != nil {
		t.Fatal(err)
	}
	control.PushResponses(&discoveryv3.DeltaDiscoveryResponse{
		SystemVersionInfo: version, TypeUrl: nds.TypeURL,
		Resources: []*discoveryv3.Resource{{Resource: &anypb.Any{TypeUrl: nds.TypeURL, Value: value}}},
	}, nil)
	if r, err := control.WaitAnswer(t.Context(), version); err != nil || r.Rejection() != nil {
		t.Fatalf("push %s: %v, %v", version, err, r.Rejection())
	}
}

// entry returns a table with one host and its entry in wire form.
func entry(t *testing.T, host, ip string) (map[string]*api.NameTable_NameInfo, []byte) {
	t.Helper()
	table := map[string]*api.NameTable_NameInfo{host: {Ips: []string{ip}, Registry: "External"}}
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(&api.NameTable{Table: table})
	if err != nil {
		t.Fatal(err)
	}
	return table, raw
}

// C11: an agent asks for changes of hosts, and answers with them. The status shows the checksum.
func TestHostChanges(t *testing.T) {
	t.Parallel()
	control := fakexds.Start(t, fakexds.Options{})
	a := start(t, config(t, control.Addr()))
	first, err := control.WaitStream(t.Context(), 1)
	if err != nil || first.Node().GetMetadata().GetFields()["NAMETAP_MERGE"].GetStringValue() != "hosts" {
		t.Fatalf("the first request is %v, %v", first, err)
	}
	all := digest.All()
	one, rawOne := entry(t, "one.example", "192.0.2.1")
	pushChange(t, control, &api.NameTable{Table: one, Change: &api.NameTable_Change{Complete: all[:], Revision: []byte("v1")}}, rawOne)
	two, rawTwo := entry(t, "two.example", "192.0.2.2")
	pushChange(t, control, &api.NameTable{Table: two, Change: &api.NameTable_Change{Revision: []byte("v2")}}, rawOne, rawTwo)
	pushChange(t, control, &api.NameTable{Change: &api.NameTable_Change{Removed: []string{"one.example"}, Revision: []byte("v3")}}, rawTwo)
	a.await(t, true)
	resp, err := dns.Exchange(new(dns.Msg).SetQuestion("two.example.", dns.TypeA), a.dnsAddr())
	if err != nil || len(resp.Answer) != 1 || !strings.HasSuffix(resp.Answer[0].String(), "\t192.0.2.2") {
		t.Errorf("two.example: %v, %v", resp, err)
	}
	var status agent.Status
	wait.Until(t, "the last change is in the status", func() bool {
		_, body := a.get(t, "/debug/status")
		status = agent.Status{}
		return json.Unmarshal([]byte(body), &status) == nil && status.XDS.Version == "v3"
	})
	if want := digest.Of(rawTwo).String(); status.Hosts != 1 || status.XDS.Mode != nds.ModeHosts || status.XDS.Digest != want {
		t.Errorf("the status is %+v", status)
	}
	if _, body := a.get(t, "/metrics"); !slices.Contains(strings.Split(body, "\n"), "nametap_xds_checksum_differences_total 0") {
		t.Error("no metric of checksum differences")
	}
}
