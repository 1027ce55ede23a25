package dnsproxy_test

import (
	"testing"

	"github.com/nametap/nametap/api"
)

// imported is the entry of a ServiceImport, or of an endpoint of one: it has no short names.
func imported(ips ...string) *api.NameTable_NameInfo {
	return &api.NameTable_NameInfo{Ips: ips, Registry: "Kubernetes"}
}

// importHosts are a ServiceImport with an address, a headless one with endpoints in two clusters, of
// which one has no hostname, and the headless Service of the own cluster.
func importHosts() hosts {
	db := withPorts(imported("10.1.0.1", "10.2.0.1", "10.2.0.2"), "sql=5432")
	db.Headless = true
	return hosts{
		"web.shop.svc.clusterset.local":            withPorts(imported("10.112.0.1"), "http=80"),
		"web.shop.svc.cluster.local":               service("web", "shop", "10.0.0.1"),
		"db.shop.svc.clusterset.local":             db,
		"db-0.c1.db.shop.svc.clusterset.local":     imported("10.1.0.1"),
		"db-0.c2.db.shop.svc.clusterset.local":     imported("10.2.0.1"),
		"10-2-0-2.c2.db.shop.svc.clusterset.local": imported("10.2.0.2"),
		"db.shop.svc.cluster.local":                headless("db", "shop", "10.2.0.1", "10.2.0.2"),
		"db-0.db.shop.svc.cluster.local":           service("db-0.db", "shop", "10.2.0.1"),
		"c9.db.shop.svc.cluster.local":             service("c9.db", "shop", "10.9.0.9"),
		"other.c9.db.shop.svc.cluster.local":       service("other.c9.db", "shop", "10.9.0.9"),
	}
}

// A ServiceImport has records as in the conformance suite of the Multi-Cluster Services API, and
// no short names.
func TestImports(t *testing.T) { // D26, D27, N8
	t.Parallel()
	p, _ := startMesh(t, importHosts())
	const web, db = "web.shop.svc.clusterset.local.", "db.shop.svc.clusterset.local."
	p.converse(t, []dialogue{
		{web + " A", web + " A 10.112.0.1"},
		{"web.shop.svc.cluster.local A", "web.shop.svc.cluster.local. A 10.0.0.1"},
		{"web.shop A", "web.shop. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		{"web.shop.svc A", "web.shop.svc. CNAME web.shop.svc.cluster.local.; web.shop.svc.cluster.local. A 10.0.0.1"},
		{"db-0.c1." + db + " A", "db-0.c1." + db + " A 10.1.0.1"},
		{"db-0.c2." + db + " A", "db-0.c2." + db + " A 10.2.0.1"},
		{"db-0.c2." + db + " AAAA", "NODATA db-0.c2." + db},
		{"10-2-0-2.c2." + db + " A", "10-2-0-2.c2." + db + " A 10.2.0.2"},
		{"db-0." + db + " A", forwarded},
		{"db-0.c3." + db + " A", forwarded},
		{"db-0.c1.db.shop A", forwarded},
		{"1.0.1.10.in-addr.arpa PTR", "1.0.1.10.in-addr.arpa. PTR db-0.c1." + db},
		// The endpoint is one of the own cluster, too.
		{"1.0.2.10.in-addr.arpa PTR", "1.0.2.10.in-addr.arpa. PTR db-0.c2." + db + "; 1.0.2.10.in-addr.arpa. PTR db-0.db.shop.svc.cluster.local."},
		{"2.0.2.10.in-addr.arpa PTR", "2.0.2.10.in-addr.arpa. PTR 10-2-0-2.c2." + db + "; 2.0.2.10.in-addr.arpa. PTR 10-2-0-2.db.shop.svc.cluster.local."},
	})
	all := []string{db + " A 10.1.0.1", db + " A 10.2.0.1", db + " A 10.2.0.2"}
	answer, _ := sections(t, p.exchange(t, "udp", question(db, 1)))
	if len(answer) != len(all) || answer[0] != all[0] || answer[1] != all[1] || answer[2] != all[2] {
		t.Errorf("%q, want %q", answer, all)
	}
	p.wantServices(t, []serviceCase{
		{web, []string{web + " SRV 0 100 80 " + web}, []string{web + " A 10.112.0.1"}},
		{
			"_sql._tcp." + db,
			[]string{"_sql._tcp." + db + " SRV 0 33 5432 10-2-0-2.c2." + db, "_sql._tcp." + db + " SRV 0 33 5432 db-0.c1." + db, "_sql._tcp." + db + " SRV 0 33 5432 db-0.c2." + db},
			[]string{"10-2-0-2.c2." + db + " A 10.2.0.2", "db-0.c1." + db + " A 10.1.0.1", "db-0.c2." + db + " A 10.2.0.1"},
		},
		{"db-0.c1." + db, []string{"db-0.c1." + db + " SRV 0 100 5432 db-0.c1." + db}, []string{"db-0.c1." + db + " A 10.1.0.1"}},
	})
}
