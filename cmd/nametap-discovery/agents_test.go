package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/nds"
)

const nameTable = "type.googleapis.com/istio.networking.nds.v1.NameTable"

// A served is a nametap-discovery that runs.
type served struct {
	t            *testing.T
	dir          string // of objects
	grpc, status string // addresses
	log          *testlog.Buffer
}

// started starts nametap-discovery with a Service.
func started(t *testing.T) *served {
	t.Helper()
	s := &served{t: t, dir: t.TempDir(), log: testlog.New(t)}
	s.put("10.0.0.1")
	cmd := exec.Command("nametap-discovery", "--config-dir", s.dir, "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0")
	cmd.Stderr = s.log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // Wait returns the error
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	for text, into := range map[string]*string{`msg="serving name tables" address=`: &s.grpc, `msg="serving status" address=`: &s.status} {
		wait.Until(t, "it logs "+text, func() bool {
			_, rest, ok := strings.Cut(s.log.String(), text)
			fields := strings.Fields(rest)
			if ok = ok && len(fields) > 0 && strings.Contains(rest, "\n"); ok {
				*into = fields[0]
			}
			return ok
		})
	}
	return s
}

// put writes the Service with an address.
func (s *served) put(ip string) {
	s.t.Helper()
	file := filepath.Join(s.dir, "web.yaml")
	err := os.WriteFile(file+".new", []byte("apiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: shop}\nspec: {clusterIP: "+ip+"}\n"), 0o600)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// istio connects a client as Istio's agent does.
func (s *served) istio() discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient {
	s.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+s.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = conn.Close() })
	stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	meta := map[string]*structpb.Value{"NAMESPACE": structpb.NewStringValue("data"), "ISTIO_VERSION": structpb.NewStringValue("1.30.0")}
	err = stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: nameTable, Node: &corev3.Node{
		Id: "sidecar~10.0.0.8~db-0.data~data.svc.cluster.local", Metadata: &structpb.Struct{Fields: meta}, UserAgentName: "envoy",
	}})
	if err != nil {
		s.t.Fatal(err)
	}
	s.acknowledge(stream)
	return stream
}

func (s *served) acknowledge(stream discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient) {
	s.t.Helper()
	push, err := stream.Recv()
	if err == nil {
		err = stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: nameTable, VersionInfo: push.GetVersionInfo(), ResponseNonce: push.GetNonce()})
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

// agent runs nametap's client in a pod of the namespace shop, until the test ends or end is called. It rejects a table in
// which the Service has the address rejected, unless that is empty.
func (s *served) agent(pod, rejected, reason string) (end func()) {
	s.t.Helper()
	client, err := nds.New(nds.Config{Addr: s.grpc, Plaintext: true, Node: nds.Node{
		PodName: pod, Namespace: "shop", Version: "v1.2.3", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")},
	}}, func(shards map[int][]byte) error {
		for _, entries := range shards {
			if rejected != "" && bytes.Contains(entries, []byte(rejected)) {
				return errors.New(reason)
			}
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- client.Run(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
	s.t.Cleanup(end)
	return end
}

// agents runs the command, and returns what it prints.
func (s *served) agents(args ...string) string {
	s.t.Helper()
	var stderr bytes.Buffer
	cmd := exec.Command("nametap-discovery", append([]string{"agents", "--http-addr", s.status}, args...)...)
	cmd.Stderr = &stderr
	text, err := cmd.Output()
	if err != nil || stderr.Len() > 0 {
		s.t.Fatalf("agents %q: %v: %s%s", args, err, text, stderr.Bytes())
	}
	return string(text)
}

// normal returns the text of the command with one text for all ages, versions of this build and names of this machine, and one
// space between columns.
func normal(text string) string {
	text = regexp.MustCompile(`\b\d+[smhd]\b`).ReplaceAllString(text, "AGE")
	text = regexp.MustCompile(`nametap (devel|v\d)\S*`).ReplaceAllString(text, "nametap VERSION")
	text = regexp.MustCompile(`replica \S+(:|,)`).ReplaceAllString(text, "replica NAME$1")
	return regexp.MustCompile(` {2,}`).ReplaceAllString(text, "  ")
}

// has waits until the command prints a text, after [normal].
func (s *served) has(want string, args ...string) {
	s.t.Helper()
	got := ""
	defer func() {
		if s.t.Failed() {
			s.t.Log(cmp.Diff(want, got))
		}
	}()
	wait.Until(s.t, "agents "+strings.Join(args, " "), func() bool {
		got = normal(s.agents(args...))
		return got == want
	})
}

// TestAgents shows agents of nametap and Istio, and a client that rejects a push.
func TestAgents(t *testing.T) { // D66
	t.Parallel()
	s := started(t)
	s.agent("web-0", "", "")
	end := s.agent("rejects", "10.0.0.2", "the text \x1b[2J\nof a client")
	istio := s.istio()
	const header = "AGENT  ADDRESS  VERSION  MODE  CONNECTED  PUSHED  ACKED  STATE  LAST NACK\n"
	s.has(header + `data/db-0  127.0.0.1  istio 1.30.0  whole  AGE  AGE  AGE  current  -
shop/rejects  127.0.0.1  nametap VERSION  named  AGE  AGE  AGE  current  -
shop/web-0  127.0.0.1  nametap VERSION  named  AGE  AGE  AGE  current  -
replica NAME: agents: 3, behind: 0 (3 current). Other replicas have other agents: ask each.
`)
	s.has(header+`data/db-0  127.0.0.1  istio 1.30.0  whole  AGE  AGE  AGE  current  -
replica NAME, namespace data: agents: 1, behind: 0 (1 current). Other replicas have other agents: ask each.
`, "--namespace", "data")

	s.put("10.0.0.2")
	s.acknowledge(istio)
	s.has(header+`shop/rejects  127.0.0.1  nametap VERSION  named  AGE  AGE  AGE  rejected  AGE ago: the text ?[2J?of a client
replica NAME: agents: 3, behind: 1 (2 current, 1 rejected). Other replicas have other agents: ask each.
`, "--stale")

	end()
	s.has(header+`replica NAME, namespace shop: agents: 1, behind: 0 (1 current). Other replicas have other agents: ask each.
`, "--stale", "-n", "shop")
}

// TestAgentsJSON reads the output for programs.
func TestAgentsJSON(t *testing.T) { // D66
	t.Parallel()
	s := started(t)
	s.agent("web-0", "10.0.0.1", "no")
	var one struct {
		Digest, ServedDigest, Replica, State string
		Hosts                                int
		Current, Behind                      bool
		Nack                                 struct {
			Reason  string
			Seconds float64
		}
	}
	lines := ""
	wait.Until(t, "the NACK is shown", func() bool {
		lines = s.agents("--output", "json", "--stale")
		return strings.Contains(lines, `"rejected"`)
	})
	keys := map[string]any{}
	if err := errors.Join(json.Unmarshal([]byte(lines), &one), json.Unmarshal([]byte(lines), &keys)); err != nil || strings.Count(lines, "\n") != 1 {
		t.Fatalf("%v: %s", err, lines)
	}
	want := strings.Fields("address behind connectedSeconds current digest hosts id lastAckSeconds lastPushSeconds mode nack name namespace replica servedDigest software state tls variant view")
	if diff := cmp.Diff(want, slices.Sorted(maps.Keys(keys))); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	if name, _ := os.Hostname(); one.Replica != name || one.Digest != "" || len(one.ServedDigest) != 32 || one.Hosts != 1 || one.Current || !one.Behind || one.Nack.Reason != "no" {
		t.Errorf("%+v", one)
	}
	if keys["view"] != "namespace shop, IPv4" || keys["variant"] != "delta" || keys["mode"] != "named" || keys["lastAckSeconds"] != nil || keys["tls"] != false {
		t.Errorf("%v", keys)
	}
}

// TestAgentsHidden checks that a namespace that shows too much is named to those who list its agents.
func TestAgentsHidden(t *testing.T) { // D64
	t.Parallel()
	s := started(t)
	var text strings.Builder
	for i := range 5 { // of 2.7 MiB in tables each
		fmt.Fprintf(&text, "---\napiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e%d, namespace: large}\nspec:\n  addresses:\n", i)
		for n := range 256 {
			fmt.Fprintf(&text, "  - 2001:1234:1234:1234:1234:1234:1234:1%03x\n", n)
		}
		text.WriteString("  hosts:\n")
		for n := range 256 {
			fmt.Fprintf(&text, "  - h%d.e%d.example\n", n, i)
		}
	}
	if err := os.WriteFile(filepath.Join(s.dir, "large.yaml"), []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	const hidden = "\nnamespace large: hosts of the namespace have "
	wait.Until(t, "the namespace is named", func() bool { return strings.Contains(s.agents("--namespace", "large"), hidden) })
	if out := s.agents("--namespace", "shop"); strings.Contains(out, hidden) {
		t.Errorf("of another namespace: %s", out)
	}
}

// TestAgentsIncomplete checks that a list that ends early, or a reply that is no list, is an error, after what came of it.
func TestAgentsIncomplete(t *testing.T) { // D66
	t.Parallel()
	for reply, want := range map[string]string{
		`{"namespace":"shop","name":"web-0","id":"x"}` + "\n": "the list is not complete: unexpected EOF",
		`{"namespace":"shop","name":"we`:                      "the list is not complete: unexpected EOF",
		`{}`:                                                  "the reply is not from nametap-discovery",
		`<html>`:                                              "the list is not complete: invalid character",
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, reply) }))
		defer srv.Close()
		var out, failed bytes.Buffer
		if code := execute(t.Context(), []string{"nametap-discovery", "agents", "--http-addr", srv.Listener.Addr().String()}, &out, &failed); code != exitFailed || !strings.Contains(failed.String(), want) {
			t.Errorf("%s: exit code %d and %q, want %q", reply, code, failed.String(), want)
		}
		if strings.HasSuffix(reply, "\n") && !strings.Contains(out.String(), "shop/web-0") {
			t.Errorf("printed is %s", out.String())
		}
	}
}
