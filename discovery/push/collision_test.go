package push

import (
	"net/netip"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/internal/testkit/birthday"
)

// D11, D31: clients are not sent the hosts of another namespace because the checksums of both tables are equal, which the
// author of hosts can arrange.
func TestEqualChecksums(t *testing.T) {
	private := birthday.Vanishing()
	public := birthday.Host{Name: "shop241.example", Addr: private[0].Addr}
	if digest.ShardOf(public.Name) != birthday.Shard {
		t.Fatal("the public host is in another shard")
	}
	entry := func(namespace string, h birthday.Host) object.Object {
		return object.Object{
			Key:   object.Key{Kind: object.KindServiceEntry, Namespace: namespace, Name: h.Name},
			Entry: &object.ServiceEntry{Hosts: []string{h.Name}, Addrs: []netip.Addr{h.Addr}, HasAddresses: true},
		}
	}
	entries := []object.Object{entry("shop", public)}
	for _, h := range private {
		e := entry("evil", h)
		e.Entry.ExportTo = object.ExportTo{Restricted: true, Namespaces: []string{"evil"}}
		entries = append(entries, e)
	}
	for _, merge := range []string{"", mergeHosts} {
		s := newService()
		s.updateAll(t, hosts.Change{Updated: entries})
		for _, namespace := range []string{"evil", "shop", "evil"} {
			c := join(t, s, namespace, merge)
			var table api.NameTable
			if err := proto.Unmarshal(c.last.GetResources()[0].GetResource().GetValue(), &table); err != nil {
				t.Fatal(err)
			}
			want := 1
			if namespace == "evil" {
				want += len(private)
			}
			if n := len(table.GetTable()); n != want {
				t.Errorf("merging %q, a client of %s was sent %d hosts, want %d", merge, namespace, n, want)
			}
		}
	}
}
