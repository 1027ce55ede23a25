package dnsproxy

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nametap/nametap/api"
)

// For every table and every packet, the fast path answers as the reference does. settings
// selects namespace, domain and search list.
func FuzzDifferential(f *testing.F) { // N1-N11, A1-A6, A8, A9
	const settings = 8
	var worlds []*world
	for seed := range uint64(settings) {
		g := newGenerator(seed)
		w := newWorld(f, g.config, g.search)
		worlds = append(worlds, w)
		g.table()
		g.keys = g.keys[:min(len(g.keys), 4)] // the fuzzer is slow on large inputs
		table := map[string]*api.NameTable_NameInfo{}
		for i, key := range g.keys {
			g.infos[i].Ips = g.infos[i].Ips[:min(len(g.infos[i].Ips), 5)]
			table[key] = g.infos[i]
		}
		wire, err := proto.Marshal(&api.NameTable{Table: table})
		if err != nil {
			f.Fatal(err)
		}
		w.load(f, table)
		for range 8 {
			packet, over := g.query(w.reference)
			f.Add(uint8(seed), wire, packet, over == overTCP)
		}
	}
	f.Fuzz(func(t *testing.T, setting uint8, wire, packet []byte, tcp bool) {
		var table api.NameTable
		if len(wire) > 1<<16 || proto.Unmarshal(wire, &table) != nil || !plainNamespaces(&table) {
			return
		}
		w := worlds[setting%settings]
		w.load(t, table.GetTable())
		over := overUDP
		if tcp {
			over = overTCP
		}
		if err := w.compare(packet, over); err != nil {
			t.Errorf("settings %+v, search %q\ntable %v\nover %s:\n%s\n%v",
				w.server.config, w.reference.search, &table, over, printable(packet), err)
		}
	})
}

// plainNamespaces reports whether all namespaces are labels, as in Kubernetes. The short
// names of a Service in any other namespace are unspecified.
func plainNamespaces(table *api.NameTable) bool {
	for _, info := range table.GetTable() {
		namespace := info.GetNamespace()
		if name, ok := refName(namespace); namespace != "" && (!ok || name != strings.ToLower(namespace)+"." ||
			strings.Count(name, ".") != 1) {
			return false
		}
	}
	return true
}
