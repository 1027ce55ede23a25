package interop

import (
	"strings"
	"testing"
)

// C1, C2: for every kind of workload, the agent's table has the entries
// that istiod has for it. The wanted hosts show that istiod takes the agent for that workload.
func TestTable(t *testing.T) {
	d := start(t, options{})
	dualStack := d.istiod(options{offset: 1000, env: []string{"ISTIO_DUAL_STACK=true"}})
	vip := []string{"--dns-auto-allocate"}
	for _, tc := range []struct {
		name     string
		istiod   *istiod
		families families
		pod      pod
		flags    []string
		want     map[string]string // addresses of hosts; none means that the host is absent
	}{
		{
			"incremental", d, dual,
			pod{"incremental", "shop"},
			nil,
			map[string]string{
				"web.shop.svc.cluster.local": "10.96.1.1", "db-0.db.shop.svc.cluster.local": "10.244.0.1", "db-2.db.shop.svc.cluster.local": "",
				"db.shop.svc.cluster.local": "10.244.0.1 10.244.0.2 10.244.0.3", "empty.shop.svc.cluster.local": "",
				"manual.back.svc.cluster.local": "192.0.2.21 192.0.2.22", "external.shop.svc.cluster.local": "",
				"private.shop.svc.cluster.local": "10.96.1.10", "private.back.svc.cluster.local": "", "web.outside.svc.cluster.local": "",
				"*.wild.example.com": "198.51.100.2", "several.example.com": "198.51.100.4 198.51.100.5 2001:db8::4",
				"Mixed.Example.COM": "198.51.100.9", "merged.example.com": "198.51.100.15 198.51.100.16", "here.example.com": "",
				"automatic.example.com": "", "network.example.com": "", "none.example.com": "",
			},
		},
		{
			"automatic VIPs", d, dual,
			pod{"automatic", "shop"}, vip,
			map[string]string{"automatic.example.com": "240.240.0.", "static.example.com": "240.240.0.", "none.example.com": ""},
		},
		{
			"dual stack", dualStack, dual,
			pod{"dual", "shop"}, vip,
			map[string]string{"both.shop.svc.cluster.local": "10.96.1.5 fd00:96::105", "automatic.example.com": "2001:2::"},
		},
		{
			"IPv4 only", d, onlyIPv4,
			pod{"four", "shop"}, vip,
			map[string]string{"automatic.example.com": "240.240.0.", "six.shop.svc.cluster.local": ""},
		},
		{
			"IPv6 only", d, onlyIPv6,
			pod{"six", "shop"}, vip,
			map[string]string{"automatic.example.com": "2001:2::", "web.shop.svc.cluster.local": "", "six.shop.svc.cluster.local": "fd00:96::106"},
		},
		{
			"another namespace", d, dual,
			pod{"other", "back"}, nil,
			map[string]string{"here.example.com": "198.51.100.6", "private.back.svc.cluster.local": "10.96.1.9", "private.shop.svc.cluster.local": ""},
		},
		{
			"a namespace with a Sidecar", d, dual,
			pod{"scoped", "scoped"}, nil,
			map[string]string{"web.scoped.svc.cluster.local": "10.96.1.3", "web.shop.svc.cluster.local": "10.96.1.1", "web.back.svc.cluster.local": ""},
		},
		{
			"a workload with a Sidecar", d, dual,
			pod{"narrow", "scoped"},
			[]string{"--labels-file", "labels"},
			map[string]string{"web.back.svc.cluster.local": "10.96.1.2", "web.scoped.svc.cluster.local": ""},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := d.machine(tc.families)
			m.write("labels", "app=\"narrow\"\n")
			a := m.agent(tc.pod, append(m.plain(tc.istiod), tc.flags...)...)
			got := tc.istiod.wantTable(a)
			for host, want := range tc.want {
				if ips := strings.Join(got[host].IPs, " "); !strings.Contains(ips, want) || (want == "") != (ips == "") {
					t.Errorf("%s has the addresses %q, want %q", host, ips, want)
				}
			}
			t.Logf("%d hosts", len(got))
		})
	}
}
