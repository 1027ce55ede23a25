package interop

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// differences are the answers in which nametap differs from Istio's agent on purpose, besides
// those that Istio's agent has for the first domain of the search list only. Each has the row
// of docs/behaviour.md that says why.
var differences = []struct{ row, name, qtype, istio, nametap string }{
	// The same address in two entries of a host.
	{"A7", "merged.example.com", "A", "198.51.100.15 198.51.100.15 198.51.100.16", "198.51.100.15 198.51.100.16"},
	{"A7", "merged.example.com.shop.svc.cluster.local", "A", "198.51.100.15 198.51.100.15 198.51.100.16", "198.51.100.15 198.51.100.16"},
	// A host that is also a short name of a Service.
	{"N7", "six.shop", "AAAA", "fd00:96::106", "NODATA"},
	{"N7", "six.shop.shop.svc.cluster.local", "AAAA", "fd00:96::106", "NODATA"},
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
	absent   shape = iota // no name of a host
	expanded              // a name of a host with a domain of the search list, which Istio's agent does not have: N5
	first                 // a name of a host with the first domain of the search list
	direct                // a name of a host
)

// N1, N2, N4, N5, N7, N9, N11, A2: beside Istio's agent on the same istiod, nametap gives the
// same answers for every host of the table, its short names, their search expansions, names
// below and absent names, in every case of letters. The differences are exactly those above.
func TestBesideIstiosAgent(t *testing.T) {
	d := start(t, options{})
	m := d.machine(dual)
	istio := m.istioAgent(d, pod{"istio", "shop"})
	a := m.agent(pod{"nametap", "shop"}, append(m.plain(d), "--dns-auto-allocate")...)
	hosts := d.wantTable(a)
	istio.await("Istio's agent has the table", func() bool { return m.ask(istioDNSAddr, "web", "A") != "NXDOMAIN" })
	if istios, ok := d.table(istio.proxy()); !ok || istios.diff(hosts) != "" {
		t.Fatalf("istiod sends Istio's agent (-) another table than nametap (+): %s", istios.diff(hosts))
	}
	search := searchList("shop")
	c, istios := m.connect(dnsAddr), m.connect(istioDNSAddr)
	defer c.Close()
	defer istios.Close()

	t.Run("answers", func(t *testing.T) {
		questions := map[string]string{} // to what Istio's agent and nametap answer, if they differ
		shapes := shapes(hosts, search)
		for name, shape := range shapes {
			for _, qtype := range []string{"A", "AAAA"} {
				theirs, got := istios.ask(name, qtype), c.ask(name, qtype)
				if shape == expanded {
					// N5: nametap has every domain of the search list.
					if want := c.ask(trim(name, shapes, search), qtype); got != want || theirs != "NXDOMAIN" {
						t.Errorf("%s %s: Istio's agent answers %s and nametap %s; want NXDOMAIN and %s", name, qtype, theirs, got, want)
					}
				} else if theirs != got {
					questions[name+" "+qtype] = theirs + " | " + got
				}
				if upper := c.ask(strings.ToUpper(name), qtype); upper != got {
					t.Errorf("%s %s in upper case: %s, want %s", name, qtype, upper, got)
				}
			}
		}
		for _, difference := range differences {
			question := difference.name + " " + difference.qtype
			if _, asked := shapes[difference.name]; !asked || difference.qtype != "A" && difference.qtype != "AAAA" {
				questions[question] = istios.ask(difference.name, difference.qtype) + " | " + c.ask(difference.name, difference.qtype)
			}
			if got, want := questions[question], difference.istio+" | "+difference.nametap; got != want {
				t.Errorf("%s: Istio's agent and nametap answer %q, want %q (%s)", question, got, want, difference.row)
			}
			delete(questions, question)
		}
		for _, question := range slices.Sorted(maps.Keys(questions)) {
			t.Errorf("%s: Istio's agent and nametap answer %s, and no row says why", question, questions[question])
		}
		counts := map[shape]int{}
		for _, s := range shapes {
			counts[s]++
		}
		t.Logf("%d hosts, %d names: %d direct, %d with the first domain of the search list, %d absent, all alike; %d with another domain (N5); %d other differences",
			len(hosts), len(shapes), counts[direct], counts[first], counts[absent], counts[expanded], len(differences))
	})

	// What a program gets, which walks the search list.
	t.Run("lookups", func(t *testing.T) {
		n := 0
		for name, shape := range shapes(hosts, search) {
			if shape == expanded || shape == first {
				continue
			}
			for _, name := range []string{name, name + "."} {
				n++
				theirs, got := istios.lookup(name, search), c.lookup(name, search)
				if strings.HasPrefix(name, "merged.example.com") || strings.TrimSuffix(name, ".") == "six.shop" {
					continue // see differences
				}
				if theirs != got {
					t.Errorf("%s: with Istio's agent %s, with nametap %s", name, theirs, got)
				}
			}
		}
		t.Logf("%d names", n)
	})
}

// shapes returns the names to ask for the hosts of a table, without trailing dots, in lower
// case.
func shapes(hosts table, search []string) map[string]shape {
	names := map[string]shape{}
	add := func(name string, s shape) { names[name] = max(names[name], s) }
	for host, e := range hosts {
		host = strings.TrimSuffix(strings.ToLower(host), ".")
		forms := []string{host}
		if e.Shortname != "" {
			forms = append(forms, e.Shortname+"."+e.Namespace, e.Shortname+"."+e.Namespace+".svc")
			if e.Namespace+".svc.cluster.local" == search[0] {
				forms = append(forms, e.Shortname)
			} else {
				add("absent."+e.Shortname, absent)
			}
		}
		if rest, wild := strings.CutPrefix(host, "*."); wild {
			forms = []string{"a." + rest, "a.b." + rest}
			add(rest, absent)
		}
		for _, form := range forms {
			add(form, direct)
			add("below."+form, absent)
			for i, domain := range search {
				if i == 0 && !strings.HasSuffix(form, "."+domain) {
					add(form+"."+domain, first)
				} else {
					add(form+"."+domain, expanded)
				}
			}
		}
	}
	for _, domain := range append(search, "example.com", "") {
		add(strings.TrimSuffix("absent."+domain, "."), absent)
	}
	for _, name := range []string{"external.shop.svc.cluster.local", "empty.shop.svc.cluster.local", "none.example.com", "network.example.com"} {
		add(name, absent)
	}
	return names
}

// trim returns a name without its domain of the search list, so that the rest is a name of a
// host.
func trim(name string, shapes map[string]shape, search []string) string {
	for _, domain := range search {
		if rest, found := strings.CutSuffix(name, "."+domain); found && shapes[rest] == direct {
			return rest
		}
	}
	panic(name + " has no domain of the search list")
}
