package main

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/testkit/testlog"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// A served is a nametap-discovery that runs.
type served struct {
	t            *testing.T
	dir          string // of objects
	grpc, status string // addresses
	log          *testlog.Buffer
}

// serveWith starts nametap-discovery with a Service and more of the environment.
func serveWith(t *testing.T, env ...string) *served {
	t.Helper()
	s := &served{t: t, dir: t.TempDir(), log: testlog.New(t)}
	s.put("10.0.0.1")
	cmd := exec.Command("nametap-discovery", "--config-dir", s.dir, "--state-dir", "", "--grpc-addr", "127.0.0.1:0", "--max-clients-per-address", "100000", "--http-addr", "127.0.0.1:0")
	cmd.Env = append(os.Environ(), env...)
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

// open opens a stream on a connection of its own, and returns the error of its first push.
func (s *served) open() (stream discoveryv3.AggregatedDiscoveryService_StreamAggregatedResourcesClient, end func(), err error) {
	s.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+s.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		s.t.Fatal(err)
	}
	end = func() { _ = conn.Close() }
	s.t.Cleanup(end)
	if stream, err = discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(s.t.Context()); err != nil {
		return nil, end, err
	}
	err = stream.Send(&discoveryv3.DiscoveryRequest{
		Node: &corev3.Node{Id: "sidecar~10.0.0.9~web.shop~shop.svc.cluster.local"}, TypeUrl: "type.googleapis.com/istio.networking.nds.v1.NameTable",
	})
	if err != nil && err != io.EOF { //nolint:errorlint // as gRPC returns it; Recv has the reason
		return nil, end, err
	}
	response, err := stream.Recv()
	if err == nil {
		err = stream.Send(&discoveryv3.DiscoveryRequest{TypeUrl: response.GetTypeUrl(), VersionInfo: response.GetVersionInfo(), ResponseNonce: response.GetNonce()})
	}
	return stream, end, err
}

// TestMemoryLimit opens streams until the memory is full. More are refused with the setting in the reason, and the
// process goes on: it serves the streams that there are, and new ones when others have ended.
func TestMemoryLimit(t *testing.T) { // D33
	t.Parallel()
	s := serveWith(t, "GOMEMLIMIT=40MiB")
	first, _, err := s.open()
	if err != nil {
		t.Fatal(err)
	}
	var ends []func()
	var reason error
	for refused := 0; refused < 200 && len(ends) < 5000; {
		_, end, err := s.open()
		switch status.Code(err) {
		case codes.OK:
			ends, refused = append(ends, end), 0
			continue
		case codes.ResourceExhausted:
			reason = err
		case codes.Unavailable: // even the connection is too much
		default:
			t.Fatal(err)
		}
		end()
		refused++
	}
	t.Logf("%d streams, then %v", len(ends), reason)
	if reason == nil || !strings.Contains(reason.Error(), "raise its memory limit (GOMEMLIMIT, or resources.limits.memory of its container)") {
		t.Errorf("no reason: %v", reason)
	}
	if s.log.Count("level=ERROR", "clients are refused", "GOMEMLIMIT") == 0 || !strings.Contains(s.metrics(), `streams_ended_total{reason="memory"} `) ||
		strings.Contains(s.metrics(), `streams_ended_total{reason="memory"} 0`) {
		t.Error("the log and the metrics do not show it")
	}
	s.put("10.0.0.2")
	if _, err := first.Recv(); err != nil {
		t.Errorf("the first client gets no change: %v", err)
	}
	for _, end := range ends {
		end()
	}
	wait.Until(t, "another client is served", func() bool {
		_, _, err := s.open()
		return err == nil
	})
}

// metrics returns the metrics.
func (s *served) metrics() string {
	s.t.Helper()
	response, err := http.Get("http://" + s.status + "/metrics")
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(text)
}
