package nds_test

import (
	"encoding/json"
	"strings"
	"testing"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/nametap/nametap/internal/testkit/fakexds"
	"github.com/nametap/nametap/nds"
)

// C5: texts of a control plane are bounded in the log and the status. Its version is complete in an answer.
func TestLongTexts(t *testing.T) {
	long := strings.Repeat("long", 50_000)
	bothVariants(t, func(t *testing.T, plane fakexds.Options) {
		t.Helper()
		h := start(t, options{plane: plane})
		body := &anypb.Any{TypeUrl: nds.TypeURL, Value: plain(t, hosts("a.example.com"))}
		push := func(kind string) {
			h.server.PushResponses(
				&discoveryv3.DeltaDiscoveryResponse{SystemVersionInfo: long, TypeUrl: kind, Resources: []*discoveryv3.Resource{{Resource: body}}},
				&discoveryv3.DiscoveryResponse{VersionInfo: long, TypeUrl: kind, Resources: []*anypb.Any{body}},
			)
		}
		push(nds.TypeURL)
		h.wantApplied(body.GetValue())
		h.wantACK(long)
		push("type.googleapis.com/" + long)
		h.wantLog("push rejected", "response of type")
		h.server.CutStreams(status.Error(codes.Unauthenticated, long))
		h.wantLog("no stream to the control plane", "without TLS no token is sent")
		for line := range strings.Lines(h.logs.String()) {
			if len(line) > 10_000 {
				t.Errorf("a line of %d bytes: %.200s", len(line), line)
			}
		}
		if text, err := json.Marshal(h.client.Status()); err != nil || len(text) > 10_000 {
			t.Errorf("a status of %d bytes, %v", len(text), err)
		}
	})
}
