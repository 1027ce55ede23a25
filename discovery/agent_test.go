package discovery

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/examples"
	"github.com/nametap/nametap/nds"
)

// Our own client gets the table of the command, in both variants, and follows
// an edit. One that asks for automatic VIPs has the external hosts without an
// address, and another does not. // C1, C2, C4
func TestOwnClient(t *testing.T) {
	const external = "mysql-instance1.us-east-1.rds.amazonaws.com"
	for name, variant := range map[string]nds.Variant{
		variantDelta: nds.Incremental, variantSotw: nds.StateOfTheWorld, variantDelta + " asks": nds.Incremental,
	} {
		t.Run(name, func(t *testing.T) {
			asks := strings.HasSuffix(name, " asks")
			dir := unpack(t, examples.Files)
			r := start(t, Config{ConfigDir: dir})
			applied := make(chan map[string]*api.NameTable, 16)
			client, err := nds.New(nds.Config{
				Addr: r.Addr().String(), Plaintext: true, Variant: variant,
				Node: nds.Node{PodName: "web-0", Namespace: "shop", AutoAllocate: asks, IPs: []netip.Addr{
					netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}},
			}, func(resources []nds.Resource) error {
				tables := map[string]*api.NameTable{}
				for _, res := range resources {
					table := &api.NameTable{}
					if err := proto.Unmarshal(res.Value, table); err != nil {
						return err
					}
					tables[res.Name] = table
				}
				applied <- tables
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- client.Run(ctx) }()
			defer func() {
				cancel()
				if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
					t.Errorf("client: %v", err)
				}
			}()

			check := func() {
				t.Helper()
				want, _, err := Table(Config{ConfigDir: dir}, Client{Namespace: "shop", AutoAllocate: asks})
				if err != nil {
					t.Fatal(err)
				}
				got := merged(t, <-applied)
				if bytesOf(t, got) != bytesOf(t, want) {
					t.Errorf("got %v\nwant %v", got, want)
				}
				if _, has := got.GetTable()[external]; has != asks {
					t.Errorf("%s is in the table: %t, want %t", external, has, asks)
				}
			}
			check()
			write(t, dir, "more.yaml", svcYAML("new", "web", "10.0.0.9"))
			check()
			write(t, dir, "more.yaml", svcYAML("shop", "web", "10.0.0.9"))
			check()
		})
	}
}
