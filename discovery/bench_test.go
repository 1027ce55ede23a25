package discovery

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/nametap/nametap/discovery/hosts"
	"github.com/nametap/nametap/discovery/object"
)

// BenchmarkEdit measures one edit with 10,000 hosts and one view: parsing the file,
// building, encoding and comparing.
func BenchmarkEdit(b *testing.B) {
	var text strings.Builder
	for i := range 10_000 {
		text.WriteString(svcYAML(fmt.Sprintf("ns%d", i%100), fmt.Sprintf("web%d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)))
	}
	data := []byte(text.String())
	key := viewKey{View: hosts.View{Namespace: "ns1", Families: bothFamilies}, merge: true}
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			parseFile("f.yaml", data)
		}
	})
	objects := objectsOf(parseFile("f.yaml", data).objects)
	all := hosts.New(defaultClusterDomain, 1, hosts.NewVIPs())
	b.Run("compare", func(b *testing.B) {
		for b.Loop() {
			all.Diff(0, objects)
		}
	})
	all.Update(all.Diff(0, objects))
	v := newView(all, key)
	b.Run("build", func(b *testing.B) {
		b.ReportAllocs()
		i := 0
		for b.Loop() {
			i++
			o := objects[0]
			o.Service = &object.Service{ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}}
			v.update(all.Update(hosts.Change{Updated: []object.Object{o}}).Hosts)
		}
	})
	b.Run("encode", func(b *testing.B) {
		for b.Loop() {
			v.encode(all, map[string]bool{"ns1": true})
		}
	})
}
