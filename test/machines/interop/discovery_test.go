package interop

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
	"github.com/nametap/nametap/test/machines/lab"
)

// tableObjects are further objects of TestDiscoveryTable.
//
//go:embed testdata/discovery.yaml
var tableObjects string

// tableDifferences are the entries of a table of nametap-discovery (+) that differ from istiod's (-), for
// the objects of the test. docs/discovery-reference.md has the reasons, in this order.
const tableDifferences = `
- both.shop.svc.cluster.local [10.96.1.5] Kubernetes both.shop
+ both.shop.svc.cluster.local [10.96.1.5 fd00:96::105] Kubernetes both.shop
- six-first.data.svc.cluster.local [fd00:96::201] Kubernetes six-first.data
+ six-first.data.svc.cluster.local [10.96.2.1 fd00:96::201] Kubernetes six-first.data
- several.data.svc.cluster.local [192.0.2.41 192.0.2.42 192.0.2.43 2001:db8::41] Kubernetes several.data
+ several.data.svc.cluster.local [192.0.2.41 192.0.2.42 192.0.2.43] Kubernetes several.data
+ alias.data.svc.cluster.local [10.96.1.1] Kubernetes alias.data alias web.shop.svc.cluster.local
+ alias-of-alias.data.svc.cluster.local [10.96.1.1] Kubernetes alias-of-alias.data alias web.shop.svc.cluster.local
+ alias-of-entry.data.svc.cluster.local [198.51.100.1] Kubernetes alias-of-entry.data alias api.example.com
+ alias-of-wildcard.data.svc.cluster.local [198.51.100.2] Kubernetes alias-of-wildcard.data alias x.wild.example.com
+ alias-of-private.data.svc.cluster.local [10.96.1.9] Kubernetes alias-of-private.data alias private.back.svc.cluster.local
+ alias-of-hidden.data.svc.cluster.local [10.96.4.1] Kubernetes alias-of-hidden.data alias web.hidden.svc.cluster.local
+ no-ports.data.svc.cluster.local [192.0.2.49] Kubernetes no-ports.data
+ other-port.data.svc.cluster.local [192.0.2.50] Kubernetes other-port.data
+ one.named.data.svc.cluster.local [192.0.2.51] Kubernetes one.named.data
+ two.named.data.svc.cluster.local [192.0.2.52 192.0.2.53] Kubernetes two.named.data
- web.back.svc.cluster.local [198.51.100.10] External
+ web.back.svc.cluster.local [10.96.1.2] Kubernetes web.back
- legacy [198.51.100.11] External
- trailing.example.com. [198.51.100.9] External
+ trailing.example.com [198.51.100.9] External
- Case.data.example.com [198.51.100.35] External
- case.data.example.com [198.51.100.36] External
+ Case.data.example.com [198.51.100.35 198.51.100.36] External
+ Mixed.Example.COM [198.51.100.9] External
+ other-revision.data.example.com [198.51.100.42] External`

// A comparison is two agents of the same workload: one of istiod, one of nametap-discovery.
type comparison struct {
	d               *lab.Istiod
	istiod, nametap *lab.Agent
}

// compare starts the two agents of a workload.
func compare(d *lab.Istiod, f families, name, namespace string, flags ...string) comparison { //nolint:revive // a line each
	d.TB.Helper()
	near, far := newHost(d.Cluster, f), newHost(d.Cluster, f)
	for _, h := range []*host{near, far} {
		h.Write("labels", "app=\"narrow\"\n")
	}
	return comparison{d, far.agent(name, namespace, append(far.plain(d.Port(15010)), flags...)...), near.agent(name, namespace, append(near.plain(discoveryPort), flags...)...)}
}

// tables returns istiod's and nametap-discovery's table, the latter without hosts that have no address (D67).
func (c comparison) tables() (istiod, nametap lab.Table) {
	istiod, _ = c.d.Table(c.istiod.Name + "." + c.istiod.Namespace)
	nametap = c.nametap.Table()
	maps.DeleteFunc(nametap, func(host string, _ lab.Entry) bool { return len(nametap[host].IPs) == 0 })
	return istiod, nametap
}

// A phase is the settings of the mesh and the labels of namespaces, for a time.
type phase struct {
	name    string
	mesh    string // empty to delete them
	objects string // that change
	// sees says which pods see a host; both tables must be so.
	sees map[string]string
}

const selectors = "discoverySelectors:\n- matchExpressions: [{key: mesh, operator: DoesNotExist}]\n- matchLabels: {mesh: edge}\n"

// phases of the comparison. All pods but scoped and narrow, which have a Sidecar, see what is public.
func phases() []phase {
	const (
		web, private, automatic = "web.shop.svc.cluster.local", "private.back.svc.cluster.local", "dns-automatic.data.example.com"
		hidden, outside, edge   = "web.hidden.svc.cluster.local", "web.outside.svc.cluster.local", "edge.example.com"
		public                  = "back data hidden root shop"
		sidecar                 = "back data hidden shop" // all but root, which has a Sidecar, too
	)
	return []phase{
		{"discovery selectors", selectors, "", map[string]string{
			web: sidecar + " scoped", private: "back", automatic: "data", hidden: "", outside: "", edge: public,
			"mirrored.data.svc.cluster.local": sidecar, "unready.data.svc.cluster.local": sidecar, "terminating.data.svc.cluster.local": sidecar,
			"to-several.data.svc.cluster.local": "back data", "to-none-and-back.data.svc.cluster.local": "", "empty.shop.svc.cluster.local": "",
			"good-status.data.example.com": "data", "label-off.data.example.com": "", "only-cidr.data.example.com": ""}},
		{"a default for exportTo", selectors + "defaultServiceExportTo: ['.', scoped]\n", "", map[string]string{
			web: "scoped shop", private: "back", automatic: "data", hidden: "", outside: "", edge: ""}},
		{"another root namespace", selectors + "rootNamespace: root\n", "", map[string]string{
			web: "scoped shop", private: "back", automatic: "data", hidden: "", outside: "", edge: public}},
		{"labels", selectors, "apiVersion: v1\nkind: Namespace\nmetadata: {name: hidden, labels: {mesh: edge}}\n---\n" +
			"apiVersion: v1\nkind: Namespace\nmetadata: {name: edge, labels: {mesh: none}}\n", map[string]string{
			web: sidecar + " scoped", private: "back", automatic: "data", hidden: "back data shop", outside: "", edge: ""}},
		{"other selectors", "discoverySelectors:\n- matchLabels: {mesh: outside}\n" +
			"- matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: [shop, data, edge]}]\n", "", map[string]string{
			web: public + " scoped narrow", private: "", automatic: "data", hidden: "", outside: public + " scoped narrow", edge: public + " scoped narrow"}},
		{"no settings", "", "", map[string]string{
			web: sidecar + " scoped", private: "back", automatic: "data", hidden: "back data shop", outside: "back data shop", edge: "back data root shop"}},
	}
}

// D2, D13: for the same cluster, the tables of nametap-discovery and istiod are equal but
// for tableDifferences, while the settings of the mesh and the labels of namespaces
// change. D11, D12: the tables of workloads with a Sidecar are equal, too, and what
// exportTo shows.
func TestDiscoveryTable(t *testing.T) {
	c := newCluster(t, objects+"\n---\n"+tableObjects)
	setMesh(c, phases()[0].mesh)
	d := c.Istiod(lab.IstiodOptions{Args: []string{"--meshConfig", c.Path("absent.yaml")}}) // instead, it reads the ConfigMap
	discovery(c)
	pods := []comparison{
		compare(d, dual, "shop", "shop"), compare(d, dual, "back", "back"), compare(d, onlyIPv4, "data", "data", "--dns-auto-allocate"),
		compare(d, dual, "scoped", "scoped"), compare(d, dual, "narrow", "scoped", "--labels-file", "labels"),
		compare(d, dual, "hidden", "hidden"), compare(d, dual, "root", "root"),
	}
	differ := map[string]bool{} // the lines that were seen
	for _, p := range phases() {
		t.Run(p.name, func(t *testing.T) {
			if p.objects != "" {
				c.Apply(p.objects)
			}
			setMesh(c, p.mesh)
			var wrong []string
			defer func() {
				if len(wrong) > 0 {
					t.Errorf("istiod (-) and nametap-discovery (+):\n%s", strings.Join(wrong, "\n"))
				}
			}()
			wait.Until(t, "the tables are equal but for the known differences", func() bool {
				wrong = nil
				for _, pair := range pods {
					istiod, nametap := pair.tables()
					wrong = append(wrong, pair.check(p, istiod, nametap, differ)...)
				}
				return len(wrong) == 0
			})
		})
	}
	known := slices.Sorted(strings.SplitSeq(tableDifferences[1:], "\n"))
	if seen := slices.Sorted(maps.Keys(differ)); !slices.Equal(seen, known) {
		t.Errorf("the differences were\n%s\nwant\n%s", strings.Join(seen, "\n"), strings.Join(known, "\n"))
	}
}

// setMesh changes the settings of the mesh, or deletes them.
func setMesh(c *lab.Cluster, settings string) {
	c.TB.Helper()
	text := fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: istio, namespace: istio-system}\ndata: {mesh: %q}\n", settings)
	if settings == "" {
		c.Remove(text)
		return
	}
	c.Apply(text)
}

// check returns what is wrong with two tables in a phase, a line for each. It adds the known differences
// to differ.
func (c comparison) check(p phase, istiod, nametap lab.Table, differ map[string]bool) (wrong []string) {
	for host, pods := range p.sees {
		want := slices.Contains(strings.Fields(pods), c.nametap.Name)
		for control, t := range map[string]lab.Table{"istiod": istiod, "nametap-discovery": nametap} {
			if _, sees := t[host]; sees != want {
				wrong = append(wrong, fmt.Sprintf("%s: %s: %s is in the table: %t", c.nametap.Name, control, host, sees))
			}
		}
	}
	diff := istiod.Diff(nametap)
	if diff == "" {
		return wrong
	}
	for line := range strings.SplitSeq(diff, "\n") {
		if strings.Contains(tableDifferences+"\n", "\n"+line+"\n") {
			differ[line] = true
		} else {
			wrong = append(wrong, c.nametap.Name+": "+line)
		}
	}
	return wrong
}
