package discovery

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/files"
	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/push"
)

// BenchmarkEdit measures one edit with 10,000 hosts: parsing the file, building the host, and encoding the table of a client that merges none.
func BenchmarkEdit(b *testing.B) {
	var text strings.Builder
	for i := range 10_000 {
		text.WriteString(svcYAML(fmt.Sprintf("ns%d", i%100), fmt.Sprintf("web%d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)))
	}
	data := []byte(text.String())
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			files.Parse("f.yaml", data)
		}
	})
	objects, _ := files.Parse("f.yaml", data)
	all := hosts.New(defaultClusterDomain, 1, hosts.NewVIPs())
	all.Update(hosts.Change{Updated: objects, Whole: true})
	b.Run("build", func(b *testing.B) {
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			i++
			o := objects[0]
			o.Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}}
			all.Update(hosts.Change{Updated: []object.Object{o}})
		}
	})
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			push.Encode(all, hosts.View{Namespace: "ns1", Families: bothFamilies})
		}
	})
}
