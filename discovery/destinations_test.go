package discovery

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/nametap/nametap/internal/testkit/fakekube"
)

// destinationEntries are ServiceEntries with ports and endpoints of every kind.
var destinationEntries = []string{
	entry("api", "hosts: [api.example.com, api.example.net.], resolution: DNS, "+
		"ports: [{number: 443, name: https, protocol: TLS}, {number: 80, name: http, protocol: HTTP, targetPort: 8080}, {number: 53, name: dns, protocol: udp}, {number: 443, name: quic, protocol: UDP}]"),
	entry("static", "hosts: [static.example.com], resolution: STATIC, ports: [{number: 3306, name: sql, protocol: MYSQL}, {number: 9104, name: metrics, protocol: HTTP, targetPort: 9000}], "+
		"endpoints: [{address: 192.0.2.2, ports: {sql: 13306}}, {address: 192.0.2.1}, {address: 'fd00::1', ports: {metrics: 9999}}, {network: far}]"),
	entry("dns", "hosts: [dns.example.com], resolution: DNS_ROUND_ROBIN, ports: [{number: 443, name: https}], endpoints: [{address: b.example.org.}, {address: a.example.org, locality: x, weight: 3}]"),
	entry("dynamic", "hosts: ['*.example.org'], resolution: DYNAMIC_DNS, ports: [{number: 443, name: tls, protocol: TLS, targetPort: 443}], endpoints: [{address: 192.0.2.9}]"),
	entry("bare", "hosts: [bare.example.com], resolution: DNS, endpoints: [{address: 192.0.2.9}]"),
	entry("udp", "hosts: [udp.example.com], resolution: DNS, ports: [{number: 53, name: dns, protocol: UDP}, {name: none}]"),
	entry("socket", "hosts: [socket.example.com], resolution: STATIC, ports: [{number: 80, name: http}], endpoints: [{address: 'unix:///run/a'}, {address: 192.0.2.4}]"),
	entry("own", "hosts: [own.example.com], addresses: [192.0.2.3], resolution: DNS, ports: [{number: 443, name: https}]"),
}

// destinationsIn formats the destinations of the hosts of a table.
func destinationsIn(t *testing.T, cfg Config, client Client) map[string]string {
	t.Helper()
	table, errs, err := Table(t.Context(), cfg, client)
	if err != nil || len(errs) > 0 {
		t.Fatal(err, errs)
	}
	out := map[string]string{}
	for host, info := range table.GetTable() {
		var texts []string
		for _, d := range info.GetDestinations() {
			texts = append(texts, strings.TrimSpace(fmt.Sprintf("%d:%d %s", d.GetPort(), d.GetTarget(), strings.Join(d.GetEndpoints(), " "))))
		}
		out[host] = strings.Join(texts, ", ")
	}
	return out
}

// E6: the hosts of ServiceEntries have where connections to their VIPs lead, from files as from the API
// server. Clients without VIPs get none of this.
func TestDestinations(t *testing.T) {
	a, dir := fakekube.Start(t), t.TempDir()
	write(t, dir, "entries.yaml", strings.Join(destinationEntries, ""))
	a.Put(fakekube.Definitions, entryDefinition)
	for _, document := range destinationEntries {
		a.Put(fakekube.ServiceEntries, strings.TrimPrefix(document, "---\n"))
	}
	for name, cfg := range map[string]Config{"files": {ConfigDir: dir}, "API": onAPI(t, a)} {
		t.Run(name, func(t *testing.T) {
			want := map[string]string{
				"api.example.com":    "80:8080, 443:0",
				"api.example.net":    "80:8080, 443:0",
				"static.example.com": "3306:0 192.0.2.1:3306 192.0.2.2:13306 [fd00::1]:3306, 9104:0 192.0.2.1:9000 192.0.2.2:9000 [fd00::1]:9999",
				"dns.example.com":    "443:0 a.example.org:443 b.example.org:443",
				"*.example.org":      "443:0",
				"bare.example.com":   "",
				"udp.example.com":    "",
				"socket.example.com": "80:0 192.0.2.4:80",
				"own.example.com":    "",
			}
			if diff := cmp.Diff(want, destinationsIn(t, cfg, Client{Namespace: "shop", AutoAllocate: true})); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if diff := cmp.Diff(map[string]string{"own.example.com": ""}, destinationsIn(t, cfg, Client{Namespace: "shop"})); diff != "" {
				t.Errorf("without VIPs: -want +got\n%s", diff)
			}
		})
	}
}
