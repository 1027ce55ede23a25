package dnsproxy_test

import (
	"testing"

	"github.com/nametap/nametap/api"
)

// headless is the entry of a headless Service.
func headless(shortname, namespace string, ips ...string) *api.NameTable_NameInfo {
	info := service(shortname, namespace, ips...)
	info.Headless = true
	return info
}

// endpointHosts are a headless Service of which one endpoint is a pod with a host name, another
// one with the same pod, and a Service with a cluster IP.
func endpointHosts() hosts {
	return hosts{
		"web.shop.svc.cluster.local":       headless("web", "shop", "10.244.1.7", "10.244.1.8", "2001:db8::7", "2001:db8::"),
		"web-0.web.shop.svc.cluster.local": service("web-0.web", "shop", "10.244.1.8"),
		"all.bank.svc.cluster.local":       headless("all", "bank", "10.244.1.8", "10.244.1.9"),
		"vip.shop.svc.cluster.local":       service("vip", "shop", "10.0.0.1"),
	}
}

// An endpoint of a headless Service has a name with its address.
func TestEndpoints(t *testing.T) { // D21
	t.Parallel()
	p, fake := startMesh(t, endpointHosts())
	const web = "web.shop.svc.cluster.local."
	const one = "10-244-1-7." + web
	p.converse(t, []dialogue{
		{one + " A", one + " A 10.244.1.7"},
		{"2001-db8--7." + web + " AAAA", "2001-db8--7." + web + " AAAA 2001:db8::7"},
		{"10-244-1-7.web A", "10-244-1-7.web. CNAME 10-244-1-7.web.shop.svc.cluster.local.; 10-244-1-7.web.shop.svc.cluster.local. A 10.244.1.7"},
		{"10-244-1-8." + web + " A", "10-244-1-8." + web + " A 10.244.1.8"}, // of a pod with a host name
		{"10-244-1-8.all.bank A", "10-244-1-8.all.bank. CNAME 10-244-1-8.all.bank.svc.cluster.local.; 10-244-1-8.all.bank.svc.cluster.local. A 10.244.1.8"},
		// With a search domain.
		{one + "shop.svc.cluster.local A", one + "shop.svc.cluster.local. CNAME " + one + "; " + one + " A 10.244.1.7"},
	})
	wantAsked(t, 0, fake)
	for _, name := range []string{
		"10-244-1-9." + web, // an endpoint of another Service
		"10-244-1-7.web-0." + web,
		"10-0-0-1.vip.shop.svc.cluster.local.",
		"10-244-1-9.all.",
	} {
		p.converse(t, []dialogue{{name + " A", forwarded}})
	}
}

// The PTR record of an endpoint's address has the host name of its pod, or else its name with
// the address.
func TestEndpointPointers(t *testing.T) { // D21, N8
	t.Parallel()
	h := endpointHosts()
	h["api.example.com"] = external("10.244.1.9")
	p, _ := startMesh(t, h)
	const v6 = "7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.8.b.d.0.1.0.0.2.ip6.arpa."
	p.converse(t, []dialogue{
		{"7.1.244.10.in-addr.arpa PTR", "7.1.244.10.in-addr.arpa. PTR 10-244-1-7.web.shop.svc.cluster.local."},
		{v6 + " PTR", v6 + " PTR 2001-db8--7.web.shop.svc.cluster.local."},
		{"8.1.244.10.in-addr.arpa PTR", "8.1.244.10.in-addr.arpa. PTR web-0.web.shop.svc.cluster.local."},
		{"9.1.244.10.in-addr.arpa PTR", "9.1.244.10.in-addr.arpa. PTR 10-244-1-9.all.bank.svc.cluster.local."}, // a Service
		{"1.0.0.10.in-addr.arpa PTR", "1.0.0.10.in-addr.arpa. PTR vip.shop.svc.cluster.local."},
	})
}
