package interop

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// differences are the answers in which nametap differs from Istio's agent on purpose, besides
// answers that Istio's agent has for the first domain of the search list only. Each has the
// row of docs/behaviour.md that gives the reason. NAMESPACE stands for the agent's namespace.
var differences = []struct{ row, name, qtype, istio, nametap string }{
	// The same address in two entries of a host.
	{"A7", "merged.example.com", "A", "198.51.100.15 198.51.100.15 198.51.100.16", "198.51.100.15 198.51.100.16"},
	{"A7", "merged.example.com.NAMESPACE.svc.cluster.local", "A", "198.51.100.15 198.51.100.15 198.51.100.16", "198.51.100.15 198.51.100.16"},
	// A host that is also a short name of a Service.
	{"N7", "six.shop", "AAAA", "fd00:96::106", "NODATA"},
	{"N7", "six.shop.NAMESPACE.svc.cluster.local", "AAAA", "fd00:96::106", "NODATA"},
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

// N1, N2, N4, N5, N7, N9, N11, A2, A4: beside Istio's agent on the same istiod, nametap gives the
// same answers for every host of the table, its short names, their search expansions, names below
// and absent names, in every case of letters. The differences are exactly the ones above.
func TestBesideIstiosAgent(t *testing.T) {
	d := start(t, options{})
	for _, namespace := range []string{"shop", "back"} {
		m := d.machine(dual)
		istio := m.istioAgent(d, pod{"istio", namespace})
		a := m.agent(pod{"nametap", namespace}, append(m.plain(d), "--dns-auto-allocate")...)
		p := pair{search: searchList(namespace), hosts: d.wantTable(a), istio: m.connect(istioDNSAddr), nametap: m.connect(dnsAddr)}
		istio.await("Istio's agent has the table", func() bool { return p.istio.ask("web", "A") == p.nametap.ask("web", "A") })
		if theirs, ok := d.table(istio.proxy()); !ok || theirs.diff(p.hosts) != "" {
			t.Fatalf("istiod sends Istio's agent (-) another table than nametap (+): %s", theirs.diff(p.hosts))
		}
		t.Run(namespace+"/answers", p.answers)
		t.Run(namespace+"/lookups", p.lookups)
		t.Run(namespace+"/types", p.types)
		p.istio.Close()
		p.nametap.Close()
	}
}

// A pair is two agents with the same table.
type pair struct {
	search         []string
	hosts          table
	istio, nametap client
}

// answers compares the answers to single queries.
func (p pair) answers(t *testing.T) {
	differ := map[string]string{} // questions with different answers
	shapes := shapes(p.hosts, p.search)
	for name, shape := range shapes {
		for _, qtype := range []string{"A", "AAAA"} {
			istio, nametap := p.istio.ask(name, qtype), p.nametap.ask(name, qtype)
			if shape == expanded {
				// N5: nametap has every domain of the search list.
				if want := p.nametap.ask(p.trim(name, shapes), qtype); nametap != want || istio != "NXDOMAIN" {
					t.Errorf("%s %s: Istio's agent answers %s and nametap %s; want NXDOMAIN and %s", name, qtype, istio, nametap, want)
				}
			} else if istio != nametap {
				differ[name+" "+qtype] = istio + " | " + nametap
			}
			if upper := p.nametap.ask(strings.ToUpper(name), qtype); upper != nametap {
				t.Errorf("%s %s in upper case: %s, want %s", name, qtype, upper, nametap)
			}
		}
	}
	namespace, _, _ := strings.Cut(p.search[0], ".")
	for _, want := range differences {
		name := strings.ReplaceAll(want.name, "NAMESPACE", namespace)
		question := name + " " + want.qtype
		if _, asked := shapes[name]; !asked || want.qtype != "A" && want.qtype != "AAAA" {
			differ[question] = p.istio.ask(name, want.qtype) + " | " + p.nametap.ask(name, want.qtype)
		}
		if got, want, row := differ[question], want.istio+" | "+want.nametap, want.row; got != want {
			t.Errorf("%s: Istio's agent and nametap answer %q, want %q (%s)", question, got, want, row)
		}
		delete(differ, question)
	}
	for _, question := range slices.Sorted(maps.Keys(differ)) {
		t.Errorf("%s: Istio's agent and nametap answer %s, and no row says why", question, differ[question])
	}
	counts := map[shape]int{}
	for _, s := range shapes {
		counts[s]++
	}
	t.Logf("%d hosts, %d names: %d direct, %d with the first domain of the search list, %d absent, all alike; %d with another domain (N5); %d other differences",
		len(p.hosts), len(shapes), counts[direct], counts[first], counts[absent], counts[expanded], len(differences))
}

// lookups compares what a program gets, whose resolver walks the search list.
func (p pair) lookups(t *testing.T) {
	n := 0
	for name, shape := range shapes(p.hosts, p.search) {
		if shape == expanded || shape == first || name == "merged.example.com" || name == "six.shop" { // see differences
			continue
		}
		for _, name := range []string{name, name + "."} {
			n++
			if istio, nametap := p.istio.lookup(name, p.search), p.nametap.lookup(name, p.search); istio != nametap {
				t.Errorf("%s: with Istio's agent %s, with nametap %s", name, istio, nametap)
			}
		}
	}
	t.Logf("%d names", n)
}

// types compares what a program gets of types that the table does not have, and that nameservers have for hosts
// outside of the cluster.
func (p pair) types(t *testing.T) {
	data := map[string]string{
		"MX": "10 mx.example.net.", "TXT": `"v=spf1 -all"`, "SRV": "0 5 443 srv.example.net.", "CAA": `0 issue "ca.example.net"`,
		"NAPTR": `100 10 "S" "SIP+D2U" "" _sip._udp.example.net.`, "URI": `10 1 "https://example.net/"`, "CNAME": "lb.example.net.",
	}
	var names, records []string
	for host := range p.hosts {
		if name := strings.TrimSuffix(strings.Replace(host, "*", "a.b", 1), "."); strings.HasSuffix(name, ".example.com") {
			names = append(names, name)
			for qtype, value := range data {
				records = append(records, name+". 60 IN "+qtype+" "+value)
			}
		}
	}
	nameserver := p.nametap.m.nameserver
	nameserver.Handle(fakedns.Answer(records...))
	defer nameserver.Handle(upstream)
	for _, name := range names {
		for qtype, want := range data {
			for _, form := range []string{name, name + "."} {
				istio, nametap := p.istio.find(form, qtype, p.search), p.nametap.find(form, qtype, p.search)
				if istio != want || nametap != want {
					t.Errorf("%s %s: with Istio's agent %s, with nametap %s, want %s", form, qtype, istio, nametap, want)
				}
			}
		}
	}
	if len(names) == 0 {
		t.Error("no host is outside of the cluster")
	}
	t.Logf("%d names, %d types, with and without the search list", len(names), len(data))
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
				add(e.Shortname, absent)
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
func (p pair) trim(name string, shapes map[string]shape) string {
	for _, domain := range p.search {
		if rest, found := strings.CutSuffix(name, "."+domain); found && shapes[rest] == direct {
			return rest
		}
	}
	panic(name + " has no domain of the search list")
}
