package interop

import (
	"testing"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// D21, D22: with the EndpointSlices of Kubernetes' controller, an agent of nametap-discovery answers
// names of endpoints, and SRV with the ports of Services and endpoints. An agent of istiod, whose tables
// say nothing about either, does not.
func TestDiscoveryServices(t *testing.T) {
	d := start(t, options{})
	d.discovery()
	far, near := d.machine(dual), d.machine(dual)
	theirs := far.agent(pod{"far", "shop"}, far.plain(d)...)
	near.agent(pod{"near", "shop"}, near.discoveryFlags()...)
	d.wantTable(theirs)
	nametaps, istiods := near.connect(dnsAddr), far.connect(dnsAddr)
	defer nametaps.Close()
	defer istiods.Close()
	wait.Until(t, "the agent of nametap-discovery has a table", func() bool { return nametaps.ask("web.shop.svc.cluster.local", "A") == "10.96.1.1" })
	const db, extra = "db.shop.svc.cluster.local.", "10-244-0-3.db.shop.svc.cluster.local."
	for _, tc := range []struct{ name, qtype, discovery, istiod string }{
		{"web.shop.svc.cluster.local", "SRV", "80:web.shop.svc.cluster.local.", "NODATA"},
		{"_http._tcp.web", "SRV", "80:web.shop.svc.cluster.local.", "NXDOMAIN"},
		{"_tcp._tcp." + db, "SRV", "5432:" + extra + " 5432:db-0." + db + " 5432:db-1." + db, "NXDOMAIN"},
		{"db-0.db", "SRV", "5432:db-0." + db, "NODATA"},
		{extra, "SRV", "5432:" + extra, "NXDOMAIN"},
		{extra, "A", "10.244.0.3", "NXDOMAIN"},
		{"10-244-0-3.db", "A", "10.244.0.3", "NXDOMAIN"},
		{"10-244-0-1." + db, "A", "NXDOMAIN", "NXDOMAIN"}, // its name is db-0
		{"192-0-2-21.manual.back.svc.cluster.local", "A", "192.0.2.21", "NXDOMAIN"},
		{"3.0.244.10.in-addr.arpa", "PTR", extra, db},
		{"1.0.244.10.in-addr.arpa", "PTR", "db-0." + db, "db-0." + db + " " + db},
	} {
		if got := nametaps.ask(tc.name, tc.qtype); got != tc.discovery {
			t.Errorf("%s %s with nametap-discovery: %s, want %s", tc.name, tc.qtype, got, tc.discovery)
		}
		if got := istiods.ask(tc.name, tc.qtype); got != tc.istiod {
			t.Errorf("%s %s with istiod: %s, want %s", tc.name, tc.qtype, got, tc.istiod)
		}
	}
}
