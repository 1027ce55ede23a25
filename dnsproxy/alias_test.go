package dnsproxy_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// alias is the entry of a Service of type ExternalName in the namespace shop.
func alias(shortname, of string, ips ...string) *api.NameTable_NameInfo {
	info := service(shortname, "shop", ips...)
	info.Alias = of
	return info
}

// A host with an alias is answered with a CNAME record to it, and with its addresses.
func TestAlias(t *testing.T) { // D9
	synctest.Test(t, func(t *testing.T) {
		p, fake := startMesh(t, hosts{
			"db.bank.svc.cluster.local":  service("db", "bank", "10.0.0.2"),
			"api.example.com":            external("192.0.2.1", "192.0.2.2"),
			"old.shop.svc.cluster.local": alias("old", "DB.bank.svc.cluster.local.", "10.0.0.2"),
			"ext.shop.svc.cluster.local": alias("ext", "api.example.com", "192.0.2.1", "192.0.2.2"),
		})
		const old, ext, db = "old.shop.svc.cluster.local.", "ext.shop.svc.cluster.local.", "db.bank.svc.cluster.local."
		const addresses = "; " + db + " A 10.0.0.2"
		p.converse(t, []dialogue{
			{old + " A", old + " CNAME " + db + addresses},
			{"old A", "old. CNAME " + old + "; " + old + " CNAME " + db + addresses},
			{ext + " A", ext + " CNAME api.example.com.; api.example.com. A 192.0.2.1; api.example.com. A 192.0.2.2"},
			{old + " AAAA", old + " CNAME " + db + "; NODATA " + db},
			{old + " CNAME", old + " CNAME " + db + "; NODATA"},
			// With a search domain: first its CNAME record.
			{old + "shop.svc.cluster.local A", old + "shop.svc.cluster.local. CNAME " + old + "; " + old + " CNAME " + db + addresses},
			// An address belongs to the host, not to its aliases.
			{"2.0.0.10.in-addr.arpa PTR", "2.0.0.10.in-addr.arpa. PTR " + db},
		})
		if resp := p.ask(t, "old", dns.TypeCNAME); len(resp.Answer) != 1 || len(resp.Ns) != 0 || !resp.Authoritative {
			t.Errorf("the answer to CNAME is not the record alone:\n%v", resp)
		}
		wantAsked(t, 0, fake)
		// Other types: as for the host behind the alias, which may have such records outside of the mesh.
		fake.Handle(fakedns.Answer(db+` 60 IN TXT "x"`, `api.example.com. 60 IN TXT "y"`))
		p.converse(t, []dialogue{
			{old + " TXT", old + " CNAME " + db + "; NODATA " + db},
			{"ext TXT", "ext. CNAME " + ext + "; " + ext + ` CNAME api.example.com.; api.example.com. TXT "y"`},
			{ext + " MX", ext + " CNAME api.example.com.; NODATA api.example.com."}, // NXDOMAIN of the nameserver
			{"ext MX", "NODATA ext."},
		})
		for _, q := range fake.Queries() {
			if strings.HasPrefix(q.Name, db) {
				t.Errorf("a Service's name was forwarded: %v", q)
			}
		}
	})
}

// An invalid alias is left out, and so is a CNAME record that would make a loop.
func TestBadAlias(t *testing.T) { // D9
	t.Parallel()
	p, _ := startMesh(t, hosts{
		"self.shop.svc.cluster.local": alias("self", "Self.shop.svc.cluster.local", "10.0.0.1"),
		"bad.shop.svc.cluster.local":  alias("bad", "a..b", "10.0.0.2"),
		"spec.shop.svc.cluster.local": alias("spec", "x.localhost", "10.0.0.3"),
		"*.example.com":               {Ips: []string{"192.0.2.1"}, Alias: "a.example.com"},
		"loop.shop.svc.cluster.local": alias("loop", "loop.corp.example", "10.0.0.4"),
	})
	p.converse(t, []dialogue{
		{"self A", "self. CNAME self.shop.svc.cluster.local.; self.shop.svc.cluster.local. A 10.0.0.1"},
		{"bad A", "bad. CNAME bad.shop.svc.cluster.local.; bad.shop.svc.cluster.local. A 10.0.0.2"},
		{"spec A", "spec. CNAME spec.shop.svc.cluster.local.; spec.shop.svc.cluster.local. A 10.0.0.3"},
		{"x.example.com A", "x.example.com. CNAME a.example.com.; a.example.com. A 192.0.2.1"},
		{"a.example.com A", "a.example.com. A 192.0.2.1"},
		{"a.example.com CNAME", "NODATA a.example.com."},
		{"a.example.com.corp.example A", "a.example.com.corp.example. CNAME a.example.com.; a.example.com. A 192.0.2.1"},
		{"loop A", "loop. CNAME loop.shop.svc.cluster.local.; loop.shop.svc.cluster.local. CNAME loop.corp.example.; loop.corp.example. A 10.0.0.4"},
		{"loop.corp.example A", "loop.corp.example. CNAME loop.shop.svc.cluster.local.; loop.shop.svc.cluster.local. A 10.0.0.4"},
	})
	if got := p.Table().Skipped(); len(got) != 3 {
		t.Errorf("left out: %v, want the aliases of self, bad and spec", got)
	}
}
