package interop

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/test/machines/lab"
)

// differences are the answers in which nametap differs from Istio's agent on purpose, besides
// answers that Istio's agent has for the first domain of the search list only. Each has the
// row of docs/behaviour.md that gives the reason. NAMESPACE stands for the agent's namespace.
var differences = []struct{ row, name, qtype, istio, nametap string }{
	// The same address in two entries of a host.
	{"A7", "merged.example.com", "A", "198.51.100.15 198.51.100.15 198.51.100.16", "198.51.100.15 198.51.100.16"},
	{"A7", "merged.example.com.NAMESPACE.svc.cluster.local", "A", "198.51.100.15 198.51.100.15 198.51.100.16", "198.51.100.15 198.51.100.16"},
	// A name that a search domain can have made of below.exact, which the nameserver has.
	{"N4", "below.exact.wild.example.com", "A", "198.51.100.2", "NXDOMAIN"},
	{"N4", "below.exact.wild.example.com", "AAAA", "NODATA", "NXDOMAIN"},
	// An ancestor of hosts.
	{"F1", "wild.example.com", "A", "NXDOMAIN", "NODATA"},
	{"F1", "wild.example.com", "AAAA", "NXDOMAIN", "NODATA"},
	// Types without addresses.
	{"A3", "web.shop.svc.cluster.local", "HTTPS", "NXDOMAIN", "NODATA"},
	{"A3", "api.example.com", "HTTPS", "NXDOMAIN", "NODATA"},
	{"A4", "web.shop.svc.cluster.local", "TXT", "NXDOMAIN", "NODATA"},
	{"A4", "api.example.com", "TXT", "NXDOMAIN", "NODATA"},
	{"A5", "web.shop.svc.cluster.local", "ANY", "NXDOMAIN", "10.96.1.1"},
	{"N8", "1.1.96.10.in-addr.arpa", "PTR", "NXDOMAIN", "web.shop.svc.cluster.local."},
}

// A shape is how a name is made of a host.
type shape int

const (
	other    shape = iota // any other name; both agents give the same answer
	expanded              // a name of a host with a domain of the search list, which Istio's agent does not have: N5
	direct                // a name of a host
)

// testIstiosAgent asks nametap's agent and Istio's agent on the same istiod: they give the same answers for every host of
// the table, its short names, their search expansions, names below and absent names, in every case of letters. The
// differences are exactly the ones above.
func testIstiosAgent(t *testing.T, d *lab.Istiod) {
	for _, namespace := range []string{"shop", "back"} {
		h := newHost(d.In(t), dual)
		istio := h.istioAgent(d, "istio", namespace)
		a := h.agent("nametap", namespace, append(h.plain(d.Port(15010)), "--dns-auto-allocate")...)
		p := pair{search: searchList(namespace), hosts: d.WantTable(a), istio: h.Connect(istioDNSAddr), nametap: h.Connect(lab.AgentDNS)}
		istio.Await("Istio's agent has the table", func() bool { return p.istio.Ask("web", "A") == p.nametap.Ask("web", "A") })
		if theirs, ok := d.Table("istio." + namespace); !ok || theirs.Diff(p.hosts) != "" {
			t.Fatalf("istiod sends Istio's agent (-) another table than nametap (+): %s", theirs.Diff(p.hosts))
		}
		t.Run(namespace, p.answers)
		p.istio.Close()
		p.nametap.Close()
	}
}

// A pair is two agents with the same table.
type pair struct {
	search         []string
	hosts          lab.Table
	istio, nametap lab.Client
}

// answers compares the answers to single queries.
func (p pair) answers(t *testing.T) {
	differ := map[string]string{} // questions with different answers
	shapes := shapes(p.hosts, p.search)
	for name, shape := range shapes {
		for _, qtype := range []string{"A", "AAAA"} {
			istio, nametap := p.istio.Ask(name, qtype), p.nametap.Ask(name, qtype)
			if shape == expanded {
				// N5: nametap has every domain of the search list.
				if want := p.nametap.Ask(p.trim(name, shapes), qtype); nametap != want || istio != "NXDOMAIN" {
					t.Errorf("%s %s: Istio's agent answers %s and nametap %s; want NXDOMAIN and %s", name, qtype, istio, nametap, want)
				}
			} else if istio != nametap {
				differ[name+" "+qtype] = istio + " | " + nametap
			}
			if upper := p.nametap.Ask(strings.ToUpper(name), qtype); upper != nametap {
				t.Errorf("%s %s in upper case: %s, want %s", name, qtype, upper, nametap)
			}
		}
	}
	namespace, _, _ := strings.Cut(p.search[0], ".")
	for _, want := range differences {
		name := strings.ReplaceAll(want.name, "NAMESPACE", namespace)
		question := name + " " + want.qtype
		if _, asked := shapes[name]; !asked || want.qtype != "A" && want.qtype != "AAAA" {
			differ[question] = p.istio.Ask(name, want.qtype) + " | " + p.nametap.Ask(name, want.qtype)
		}
		if got, want, row := differ[question], want.istio+" | "+want.nametap, want.row; got != want {
			t.Errorf("%s: Istio's agent and nametap answer %q, want %q (%s)", question, got, want, row)
		}
		delete(differ, question)
	}
	for _, question := range slices.Sorted(maps.Keys(differ)) {
		t.Errorf("%s: Istio's agent and nametap answer %s, and no row says why", question, differ[question])
	}
	t.Logf("%d hosts, %d names", len(p.hosts), len(shapes))
}

// shapes returns the names to ask for the hosts of a table, without trailing dots, in lower case.
func shapes(hosts lab.Table, search []string) map[string]shape {
	names := map[string]shape{}
	add := func(name string, s shape) { names[name] = max(names[name], s) }
	for host, e := range hosts {
		forms := []string{host}
		if e.Shortname != "" {
			forms = append(forms, e.Shortname+"."+e.Namespace, e.Shortname+"."+e.Namespace+".svc")
			if e.Namespace+".svc.cluster.local" == search[0] {
				forms = append(forms, e.Shortname)
			} else {
				add(e.Shortname, other)
			}
		}
		rest, wild := strings.CutPrefix(host, "*.")
		if wild {
			forms = []string{"a." + rest, "a.b." + rest}
			add(rest, other)
		}
		for _, form := range forms {
			add(form, direct)
			if !wild {
				add("below."+form, other)
			}
			for i, domain := range search {
				s := expanded
				if i == 0 && !strings.HasSuffix(form, "."+domain) || e.Registry == "External" && strings.HasSuffix(domain, "cluster.local") {
					s = other // Istio's agent has the first domain; no external host has a name of the cluster (N5)
				}
				add(form+"."+domain, s)
			}
		}
	}
	for _, domain := range append(search, "example.com", "") {
		add(strings.TrimSuffix("absent."+domain, "."), other)
	}
	for _, name := range []string{"external.shop.svc.cluster.local", "empty.shop.svc.cluster.local", "none.example.com", "network.example.com"} {
		add(name, other)
	}
	return names
}

// trim returns a name without its domain of the search list, so that the rest is a name of a host.
func (p pair) trim(name string, shapes map[string]shape) string {
	for _, domain := range p.search {
		if rest, found := strings.CutSuffix(name, "."+domain); found && shapes[rest] == direct {
			return rest
		}
	}
	panic(name + " has no domain of the search list")
}
