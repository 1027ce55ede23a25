package discovery

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/discovery/hosts"
)

// The tables are the same as istiod's, recorded for the same objects, except for the
// values of automatic VIPs, and for Services without an address, which istiod leaves out.
func TestSameAsIstiod(t *testing.T) {
	objects, err := os.ReadFile(filepath.Join("testdata", "istiod", "objects.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for file, f := range map[string]hosts.Families{"k8s-sotw-default.json": {V4: true}, "k8s-v6only.json": {V6: true}} {
		t.Run(file, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", "istiod", file))
			if err != nil {
				t.Fatal(err)
			}
			var recorded api.NameTable
			if err := protojson.Unmarshal(data, &recorded); err != nil {
				t.Fatal(err)
			}
			for _, info := range recorded.GetTable() {
				slices.Sort(info.Ips) // istiod's order changes
			}
			got := tableOf(t, string(objects), hosts.View{Namespace: "default", Families: f, VIPs: true})
			maps.DeleteFunc(got, func(_, text string) bool { return strings.HasSuffix(text, " ") })
			if diff := cmp.Diff(show(&recorded), got); diff != "" {
				t.Errorf("-istiod +nametap\n%s", diff)
			}
		})
	}
}
