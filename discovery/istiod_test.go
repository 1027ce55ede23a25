package discovery

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/nametap/nametap/api"
)

// The tables are the same as istiod's, recorded for the same objects, except for the
// values of automatic VIPs.
func TestSameAsIstiod(t *testing.T) {
	objects, err := os.ReadFile(filepath.Join("testdata", "istiod", "objects.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for file, f := range map[string]families{"k8s-sotw-default.json": {v4: true}, "k8s-v6only.json": {v6: true}} {
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
			got := tableOf(t, string(objects), viewKey{namespace: "default", families: f, vips: true})
			if diff := cmp.Diff(show(&recorded), got); diff != "" {
				t.Errorf("-istiod +nametap\n%s", diff)
			}
		})
	}
}
