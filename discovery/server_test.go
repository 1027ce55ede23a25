package discovery

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// open opens a stream of either variant.
func open(t *testing.T, variant string, r running, n *corev3.Node) client {
	t.Helper()
	if variant == variantSotw {
		return openSotw(t, r, n)
	}
	return openDelta(t, r, n, nil)
}

func svcYAML(namespace, name, ip string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: %s}\nspec: {clusterIP: %s}\n",
		name, namespace, ip)
}

// C2, D43: without an object in the directory the server is not ready and serves no stream, so that no client drops its
// hosts. From the first object on, edits are pushed.
func TestLiveEdit(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svc("web", "clusterIP: broken"))
	r := startUnready(t, Config{ConfigDir: dir})
	wait.Until(t, "it says why it waits", func() bool { return strings.Contains(r.Waiting(), "--allow-empty") })
	for _, variant := range []string{variantSotw, variantDelta} {
		err := open(t, variant, r, node(t, "shop")).err()
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "--allow-empty") {
			t.Errorf("%s: got %v, want Unavailable with the reason", variant, err)
		}
	}
	if chans.Closed(r.Ready()) {
		t.Error("ready without an object")
	}
	write(t, dir, "sub/deep/b.yml", svc("cart", "clusterIP: 10.0.0.1"))
	wait.For(t, "the server is ready", r.Ready())
	if why := r.Waiting(); why != "" {
		t.Errorf("ready, and still waiting: %s", why)
	}
	clients := []client{openSotw(t, r, node(t, "shop")), openDelta(t, r, node(t, "shop"), nil)}
	want := func(hosts string) {
		t.Helper()
		for _, c := range clients {
			if c.next(); hostsOf(t, c) != "map["+hosts+"]" {
				t.Errorf("got %s, want %s", hostsOf(t, c), hosts)
			}
		}
	}
	want("cart.shop.svc.cluster.local:10.0.0.1")
	// An edit that does not change the table sends nothing.
	write(t, dir, "sub/deep/b.yml", "# a comment\n"+svc("cart", "clusterIP: 10.0.0.1"))
	write(t, dir, "a.yaml", svc("web", "clusterIP: 10.0.0.2"))
	want("cart.shop.svc.cluster.local:10.0.0.1 web.shop.svc.cluster.local:10.0.0.2")
	if err := os.Remove(filepath.Join(dir, "a.yaml")); err != nil {
		t.Fatal(err)
	}
	want("cart.shop.svc.cluster.local:10.0.0.1")
}

// An incremental client that connects again with the version of its table is not sent it again. It always gets an answer.
func TestDeltaResumes(t *testing.T) {
	r := start(t, Config{ConfigDir: unpack(t, examples.Files)})
	first := openDelta(t, r, node(t, "a"), nil).next()
	versions := map[string]string{}
	for _, resource := range first.raw.(*discoveryv3.DeltaDiscoveryResponse).GetResources() {
		versions[resource.GetName()] = resource.GetVersion()
	}
	if p := openDelta(t, r, node(t, "a"), versions).next(); len(p.tables)+len(p.removed) != 0 {
		t.Errorf("sent %v, removed %v to a client that has everything", p.tables, p.removed)
	}
	versions[""] = "other"
	if p := openDelta(t, r, node(t, "a"), versions).next(); len(p.tables) != 1 {
		t.Errorf("sent %v to a client with another version", p.tables)
	}
}

func TestBadNodes(t *testing.T) {
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true})
	good := node(t, "a")
	booleans := node(t, "a")
	booleans.Metadata.Fields["DNS_CAPTURE"] = structpb.NewBoolValue(true)
	for name, n := range map[string]*corev3.Node{
		"none":         nil,
		"no id":        {Metadata: good.Metadata},
		"three parts":  {Id: "sidecar~10.0.0.1~web-0.a", Metadata: good.Metadata},
		"no namespace": {Id: "sidecar~10.0.0.1~web-0~x"},
		"no address":   {Id: "sidecar~pod~web-0.a~x"},
		"booleans":     booleans,
	} {
		for _, variant := range []string{variantSotw, variantDelta} {
			t.Run(name+" "+variant, func(t *testing.T) {
				if err := open(t, variant, r, n).err(); status.Code(err) != codes.InvalidArgument {
					t.Errorf("got %v, want InvalidArgument", err)
				}
			})
		}
	}
}

func TestRunErrors(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	addr := ln.Addr().String()
	s, err := New(Config{ConfigDir: t.TempDir(), GRPCAddr: addr})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil || !strings.Contains(err.Error(), addr) {
		t.Errorf("Run on a taken address: %v, want an error that names %s", err, addr)
	}
	if _, err := New(Config{ConfigDir: "/no/such/directory"}); err == nil || !strings.Contains(err.Error(), "/no/such/directory") {
		t.Errorf("New with a missing directory: %v", err)
	}
}
