package discovery

import (
	"fmt"
	"net"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/nametap/nametap/examples"
)

// open opens a stream of either variant.
func open(t *testing.T, variant string, r running, n *corev3.Node) client {
	t.Helper()
	if variant == variantSotw {
		return openSotw(t, r, n)
	}
	return openDelta(t, r, n, nil)
}

// C2, N7: both variants and 25 restarts give the same bytes.
func TestSameTableEverywhere(t *testing.T) {
	t.Parallel()
	dir := unpack(t, examples.Files)
	want := ""
	for restart := range 25 {
		r := start(t, Config{ConfigDir: dir})
		for _, variant := range []string{variantSotw, variantDelta} {
			c := open(t, variant, r, node(t, "shop"))
			if p := c.next(); len(p.tables) != 1 {
				t.Errorf("%s: %d resources for a client that does not merge", variant, len(p.tables))
			}
			got := bytesOf(t, merged(t, c.state()))
			if want == "" {
				want = got
			}
			if got != want {
				t.Fatalf("restart %d, %s: another table", restart, variant)
			}
		}
		if errs := r.Errors(); len(errs) > 0 {
			t.Fatalf("examples have errors: %v", errs)
		}
		r.stop()
	}
	if len(want) < 500 {
		t.Errorf("table is only %d bytes", len(want))
	}
}

func svcYAML(namespace, name, ip string) string {
	return fmt.Sprintf("---\napiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: %s}\nspec: {clusterIP: %s}\n",
		name, namespace, ip)
}

// C2: an edit is pushed.
func TestLiveEdit(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{variantSotw, variantDelta} {
		t.Run(variant, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, "a.yaml", svcYAML("a", "x", "10.0.0.1"))
			write(t, dir, "b.yaml", svcYAML("b", "y", "10.0.0.2"))
			r := start(t, Config{ConfigDir: dir})
			c := open(t, variant, r, node(t, "a"))
			c.next()
			c.quiet()

			write(t, dir, "b.yaml", svcYAML("b", "y", "10.0.0.3"))
			c.next()
			if got := merged(t, c.state()).GetTable()["y.b.svc.cluster.local"].GetIps(); fmt.Sprint(got) != "[10.0.0.3]" {
				t.Errorf("y has %v", got)
			}

			// An edit that does not change the table sends nothing.
			write(t, dir, "b.yaml", "# a comment\n"+svcYAML("b", "y", "10.0.0.3"))
			c.quiet()

			write(t, dir, "b.yaml", "# nothing\n")
			c.next()
			if n := len(merged(t, c.state()).GetTable()); n != 1 {
				t.Errorf("%d hosts left, want 1", n)
			}

			// A new directory is watched at once.
			write(t, dir, "sub/deep/c.yml", svcYAML("c", "z", "10.0.0.4"))
			c.next()
			write(t, dir, "sub/deep/c.yml", svcYAML("c", "z", "10.0.0.5"))
			c.next()
			if got := merged(t, c.state()).GetTable()["z.c.svc.cluster.local"].GetIps(); fmt.Sprint(got) != "[10.0.0.5]" {
				t.Errorf("z has %v", got)
			}
		})
	}
}

// D35: a client that does not merge gets one unnamed table, as from istiod.
func TestUnmergedResourceHasNoName(t *testing.T) {
	t.Parallel()
	r := start(t, Config{ConfigDir: t.TempDir(), AllowEmpty: true})
	c := openDelta(t, r, node(t, "a"), nil)
	p := c.next()
	if table, ok := p.tables[""]; !ok || len(p.tables) != 1 || len(table.GetTable()) != 0 {
		t.Errorf("an empty directory gives %v, want one empty table without a name", p.tables)
	}
	s := openSotw(t, r, node(t, "a"))
	if p := s.next(); len(p.tables) != 1 {
		t.Errorf("sotw: %d resources, want 1", len(p.tables))
	}
	s.quiet()
}

// C3: a rejected push is not sent again; the next one is sent.
func TestNackIsNotSentAgain(t *testing.T) {
	t.Parallel()
	for _, variant := range []string{variantSotw, variantDelta} {
		t.Run(variant, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, "a.yaml", svcYAML("a", "x", "10.0.0.1"))
			reg := prometheus.NewRegistry()
			r := start(t, Config{ConfigDir: dir, Registerer: reg})
			c := open(t, variant, r, node(t, "a"))
			c.nack()
			c.next()
			c.quiet()
			write(t, dir, "a.yaml", svcYAML("a", "x", "10.0.0.2"))
			c.next()
			c.quiet()
			if n := r.metric(t, "rejected_total", variant); n != 1 {
				t.Errorf("%v refusals counted, want 1", n)
			}
			if n := r.metric(t, "pushes_total", variant); n != 2 {
				t.Errorf("%v pushes counted, want 2", n)
			}
			if n := r.metric(t, "clients", variant); n != 1 {
				t.Errorf("%v clients counted, want 1", n)
			}
		})
	}
}

// An incremental client that reconnects with the version of its table is not sent it again. It
// always gets an answer.
func TestDeltaResumes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, dir, "a.yaml", svcYAML("a", "x", "10.0.0.1"))
	write(t, dir, "b.yaml", svcYAML("b", "y", "10.0.0.2"))
	r := start(t, Config{ConfigDir: dir})
	first := openDelta(t, r, node(t, "a"), nil)
	versions := versionsOf(t, first.next())
	r.stop()

	r = start(t, Config{ConfigDir: dir})
	c := openDelta(t, r, node(t, "a"), versions)
	if p := c.next(); len(p.tables)+len(p.removed) != 0 {
		t.Errorf("sent %v, removed %v to a client that has everything", p.tables, p.removed)
	}
	versions[""] = "other"
	c = openDelta(t, r, node(t, "a"), versions)
	if p := c.next(); len(p.tables) != 1 || len(p.tables[""].GetTable()) != 2 {
		t.Errorf("sent %v to a client with another version", p.tables)
	}
}

func TestBadNodes(t *testing.T) {
	t.Parallel()
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
	t.Parallel()
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

func versionsOf(t *testing.T, p pushed) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, res := range p.raw.(*discoveryv3.DeltaDiscoveryResponse).GetResources() {
		out[res.GetName()] = res.GetVersion()
	}
	return out
}
