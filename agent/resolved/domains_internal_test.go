package resolved

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// V5: which domains are registered.
func TestChoose(t *testing.T) {
	for _, test := range []struct {
		name                 string
		always, domains, has []string
	}{
		{"nothing", nil, nil, nil},
		{"always first", []string{"cluster.local", "svc"}, []string{"a.example.com"}, []string{"cluster.local", "svc", "a.example.com"}},
		{"covered", []string{"example.com"}, []string{"a.example.com", "example.com", "anexample.com"}, []string{"example.com", "anexample.com"}},
		{"below .local", nil, []string{"x.com", "a.b.local", "c.b.local", "d.local"}, []string{"b.local", "d.local", "x.com"}},
		{"few labels first", nil, []string{"a.b.example.com", "b.example.com", "z.com"}, []string{"z.com", "b.example.com"}},
		{"upper case", []string{"Cluster.Local"}, []string{"x.cluster.local"}, []string{"cluster.local"}},
		{"no host name", nil, []string{`a\032b.example.com`, "", "_x.example.com"}, []string{"_x.example.com"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			has, others := choose(test.always, test.domains)
			if diff := cmp.Diff(test.has, has); diff != "" || others != 0 {
				t.Errorf("%d others, %s", others, diff)
			}
		})
	}
}

// V5: of 10,000 domains as many are registered as systemd-resolved accepts, including domains
// below .local. The order of the table has no influence.
func TestChooseAtLimit(t *testing.T) {
	domains := []string{"last.local"}
	for i := range 10_000 {
		domains = append(domains, fmt.Sprintf("host-%d.example.com", i))
	}
	has, others := choose([]string{"cluster.local"}, domains)
	if len(has) != 256 || others != len(domains)+1-256 {
		t.Errorf("%d domains and %d others", len(has), others)
	}
	if has[0] != "cluster.local" || has[1] != "last.local" {
		t.Errorf("the first domains are %q", has[:2])
	}
	slices.Reverse(domains)
	if again, _ := choose([]string{"cluster.local"}, domains); !slices.Equal(has, again) {
		t.Error("the order of the domains changes the choice")
	}
}
