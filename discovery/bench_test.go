package discovery

import (
	"fmt"
	"strings"
	"testing"
)

// BenchmarkEdit measures one edit with 10,000 hosts and one view: parsing the file,
// building, encoding and comparing.
func BenchmarkEdit(b *testing.B) {
	var text strings.Builder
	for i := range 10_000 {
		text.WriteString(svcYAML(fmt.Sprintf("ns%d", i%100), fmt.Sprintf("web%d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)))
	}
	data := []byte(text.String())
	key := viewKey{namespace: "ns1", families: bothFamilies, merge: true}
	b.Run("parse", func(b *testing.B) {
		for b.Loop() {
			parseFile("f.yaml", data)
		}
	})
	p := parseFile("f.yaml", data)
	b.Run("build", func(b *testing.B) {
		for b.Loop() {
			snap, _ := newSnapshot(objectsOf(p.objects), defaultClusterDomain, &vips{})
			if _, err := newView(snap, key); err != nil {
				b.Fatal(err)
			}
		}
	})
}
