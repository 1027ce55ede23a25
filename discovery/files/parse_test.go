package files

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The error of a broken document has the file, the number of the document, the object and the field. The other documents of the
// file are used.
func TestBrokenDocuments(t *testing.T) {
	t.Parallel()
	const good = "---\napiVersion: v1\nkind: Service\nmetadata: {name: good}\nspec: {clusterIP: 10.0.0.1}\n"
	for _, tt := range []struct {
		name, doc string
		want      string // the first error, as a person sees it
	}{
		{"list for a string", "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  clusterIP: [10.0.0.1]\n",
			"shop.yaml, document 2, Service default/web: spec.clusterIP: want a string, got a list"},
		{"no address", "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  clusterIP: ten\n",
			`shop.yaml, document 2, Service default/web: spec.clusterIP: want an IP address, got "ten"`},
		{"clusterIPs", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  clusterIPs:\n  - 10.0.0.1\n  - x\n",
			`shop.yaml, document 2, Service default/web: spec.clusterIPs[1]: want an IP address, got "x"`},
		{"None and an address", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: None, clusterIPs: [10.0.0.1]}\n",
			"shop.yaml, document 2, Service default/web: spec.clusterIP: clusterIP and clusterIPs hold both None and an address"},
		{"type", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {type: Internal}\n",
			`shop.yaml, document 2, Service default/web: spec.type: want ClusterIP, NodePort, LoadBalancer or ExternalName, got "Internal"`},
		{"spec", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: []\n",
			"shop.yaml, document 2, Service default/web: spec: want an object, got a list"},
		{"twice", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec:\n  clusterIP: 10.0.0.1\n  clusterIP: 10.0.0.2\n",
			`shop.yaml, document 2: line 6: mapping key "clusterIP" already defined at line 5`},
		{"no name", "apiVersion: v1\nkind: Service\nmetadata: {}\n", "shop.yaml, document 2: metadata.name: is missing"},
		{"bad name", "apiVersion: v1\nkind: Service\nmetadata: {name: a.b}\n",
			`shop.yaml, document 2, Service default/a.b: metadata.name: want a name of letters, digits and hyphens, got "a.b"`},
		{"bad namespace", "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: -x}\n",
			`shop.yaml, document 2, Service -x/a: metadata.namespace: want a name of letters, digits and hyphens, got "-x"`},
		{"no kind", "apiVersion: v1\nmetadata: {name: a}\n",
			"shop.yaml, document 2: kind: is missing: want Service, EndpointSlice, Pod, ServiceEntry, Sidecar, ServiceImport or List"},
		{"no object", "- a\n", "shop.yaml, document 2: want an object, got a list"},
		{"syntax", "kind: Service\n  oops: x\n", "shop.yaml, document 2: line 2: not valid YAML: mapping values are not allowed in this context"},
		{"tab", "kind: Service\nspec:\n\tclusterIP: x\n", "shop.yaml, document 2: line 3: not valid YAML: found character that cannot start any token (want spaces before the text of a line, not a tab)"},
		{"two values", "{kind: A}\n{kind: B}\n", "shop.yaml, document 2: line 2: not valid YAML: did not find expected <document start>"},
		{"lines that end in CR", "kind: Pod\r---\rkind: Pod\r\n", "shop.yaml, document 2: holds several documents: want UTF-8, and lines that end in LF or CRLF"},
		{"service exportTo", "apiVersion: v1\nkind: Service\nmetadata: {name: web, annotations: {networking.istio.io/exportTo: 'a,b c'}}\n",
			`shop.yaml, document 2, Service default/web: metadata.annotations.networking.istio.io/exportTo: want namespaces, ".", "*" or "~", got "b c"`},
		{"headless scope", "apiVersion: v1\nkind: Service\nmetadata: {name: web, annotations: {nametap.dev/headless-scope: all}}\nspec: {clusterIP: None}\n",
			`shop.yaml, document 2, Service default/web: metadata.annotations.nametap.dev/headless-scope: want network or cluster, got "all"`},
		{"exportTo", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], exportTo: ['a b']}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.exportTo: want namespaces, ".", "*" or "~", got "a b"`},
		{"hosts", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {}\n",
			"shop.yaml, document 2, ServiceEntry default/e: spec.hosts: is missing: a ServiceEntry needs at least one host"},
		{"host", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: ['a..b']}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.hosts[0]: want a DNS name or *.suffix, got "a..b"`},
		{"star", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: ['*']}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.hosts[0]: want a DNS name or *.suffix, got "*"`},
		{"long label", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [" + strings.Repeat("a", 64) + ".b]}\n",
			"shop.yaml, document 2, ServiceEntry default/e: spec.hosts[0]: want a DNS name or *.suffix, got \"" + strings.Repeat("a", 64) + ".b\""},
		{"empty host", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [null]}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.hosts[0]: want a DNS name or *.suffix, got ""`},
		{"addresses", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], addresses: [10.0.0.0/33]}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.addresses[0]: want an IP address or a CIDR, got "10.0.0.0/33"`},
		{"resolution", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], resolution: dns}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.resolution: want NONE, STATIC, DNS, DNS_ROUND_ROBIN or DYNAMIC_DNS, got "dns"`},
		{"entry port", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], ports: [{number: 443}, {number: 0}]}\n",
			"shop.yaml, document 2, ServiceEntry default/e: spec.ports.number: want a port number, 1 to 65535, got the number 0"},
		{"entry port name", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], ports: [{number: 443, name: a}, {number: 444, name: a}]}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.ports[1].name: want a name that no other port has, got "a"`},
		{"entry target port", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], ports: [{number: 443, targetPort: http}]}\n",
			"shop.yaml, document 2, ServiceEntry default/e: spec.ports.targetPort: want a port number, 1 to 65535, got a string"},
		{"entry endpoint", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], endpoints: [{address: 1.2.3.4}, {address: 10.0.0.0/8}]}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.endpoints[1].address: want an IP address or a DNS name, got "10.0.0.0/8"`},
		{"entry endpoint below a wildcard", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], endpoints: [{address: '*.b'}]}\n",
			`shop.yaml, document 2, ServiceEntry default/e: spec.endpoints[0].address: want an IP address or a DNS name, got "*.b"`},
		{"entry endpoint port", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: e}\nspec: {hosts: [a.b], endpoints: [{address: 1.2.3.4, ports: {http: 65536}}]}\n",
			"shop.yaml, document 2, ServiceEntry default/e: spec.endpoints.ports: want a port number, 1 to 65535, got the number 65536"},
		{"slice address", "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s}\nendpoints:\n- addresses:\n  - 1.2.3\n",
			`shop.yaml, document 2, EndpointSlice default/s: endpoints[0].addresses[0]: want an IP address, got "1.2.3"`},
		{"slice type", "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s}\naddressType: MAC\n",
			`shop.yaml, document 2, EndpointSlice default/s: addressType: want IPv4, IPv6 or FQDN, got "MAC"`},
		{"slice hostname", "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s}\nendpoints: [{hostname: a.b, addresses: [10.0.0.1]}]\n",
			`shop.yaml, document 2, EndpointSlice default/s: endpoints[0].hostname: want a DNS label, got "a.b"`},
		{"port number", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 80}, {name: x, port: 65536}]}\n",
			"shop.yaml, document 2, Service default/web: spec.ports.port: want a port number, 1 to 65535, got the number 65536"},
		{"target port", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: None, ports: [{port: 80, targetPort: -1}]}\n",
			"shop.yaml, document 2, Service default/web: spec.ports.targetPort: want a port number, 1 to 65535, got the number -1"},
		{"port name", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.0.0.1, ports: [{name: a.b, port: 80}]}\n",
			`shop.yaml, document 2, Service default/web: spec.ports[0].name: want a DNS label, got "a.b"`},
		{"two ports of a name", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.0.0.1, ports: [{name: a, port: 80}, {name: a, port: 81}]}\n",
			`shop.yaml, document 2, Service default/web: spec.ports[1].name: want a name that no other port has, got "a"`},
		{"port protocol", "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.0.0.1, ports: [{port: 80, protocol: tcp}]}\n",
			`shop.yaml, document 2, Service default/web: spec.ports[0].protocol: want TCP, UDP or SCTP, got "tcp"`},
		{"pod", "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {hostname: a.b}\nstatus: {podIPs: [{ip: x}]}\n",
			`shop.yaml, document 2, Pod default/p: spec.hostname: want a DNS label, got "a.b"`},
		{"list item", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: {clusterIP: 1}\n",
			"shop.yaml, document 2, Service default/a: items[0].spec.clusterIP: want a string, got a number"},
		{"list in list", "apiVersion: v1\nkind: List\nitems:\n- kind: List\n  items: []\n",
			"shop.yaml, document 2: items[0]: a List in a List is not supported"},
		{"alias to itself", "apiVersion: v1\nkind: Service\nmetadata: &m\n  name: *m\n", "shop.yaml, document 2: not valid YAML: anchor 'm' value contains itself"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := parseFile("shop.yaml", []byte(good+"---\n"+tt.doc+strings.Replace(good, "good", "last", 1)))
			if len(p.errs) == 0 {
				t.Fatal("no error")
			}
			if got := p.errs[0].Error(); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
			if got := keysOf(p.objects); !cmp.Equal(got, []string{"Service default/good", "Service default/last"}) {
				t.Errorf("objects %v, want the good ones", got)
			}
		})
	}
}

func keysOf(objects []located) []string {
	var out []string
	for _, o := range objects {
		out = append(out, o.Key.String())
	}
	return out
}

func TestValidDocuments(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, doc string
		want      []string
		notes     int
	}{
		{"nothing", "", nil, 0},
		{"comments", "# a\n---\n# b\n---\n---# c\n", nil, 0},
		{"null", "---\nnull\n", nil, 0},
		{"directive", "%YAML 1.2\n---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: None}\n...\n", []string{"Service default/a"}, 0},
		{"byte order mark and CRLF", "\xef\xbb\xbfapiVersion: v1\r\nkind: Pod\r\nmetadata: {name: a}\r\n---\r\napiVersion: v1\r\nkind: Pod\r\nmetadata: {name: b}\r\n",
			[]string{"Pod default/a", "Pod default/b"}, 0},
		{"JSON with tabs", "{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"Pod\",\n\t\"metadata\": {\"name\": \"a\"}\n}\n", []string{"Pod default/a"}, 0},
		{"list", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Pod, metadata: {name: a}}\n- {apiVersion: v1, kind: Secret, metadata: {name: b}}\n",
			[]string{"Pod default/a"}, 1},
		{"typed list", "apiVersion: v1\nkind: ServiceList\nitems:\n- {metadata: {name: a}, spec: {clusterIP: None}}\n", []string{"Service default/a"}, 0},
		{"what JSON lacks", "kind: Service\nmetadata: {name: a, namespace: 2024-01-01, labels: {1: b}}\nspec: {clusterIP: None}\n", []string{"Service 2024-01-01/a"}, 0},
		{"other kinds", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n---\napiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: a}\n", nil, 2},
		{"unallocated", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {selector: {app: a}}\n", []string{"Service default/a"}, 1},
		{"anchors and merge keys", "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: a}\n  spec: &s {clusterIP: None}\n" +
			"- apiVersion: v1\n  kind: Service\n  metadata: {name: b}\n  spec:\n    <<: *s\n    type: ClusterIP\n", []string{"Service default/a", "Service default/b"}, 0},
		{"unknown fields", "apiVersion: v1\nkind: Pod\nmetadata: {name: a, managedFields: [{a: 1}]}\nspec: {containers: [{x: y}]}\nstatus: {qosClass: 1}\n", []string{"Pod default/a"}, 0},
		{"null fields", "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: null, annotations: ~}\nspec: {clusterIP: None, selector: }\n", []string{"Service default/a"}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := parseFile("f.yaml", []byte(tt.doc))
			if len(p.errs) > 0 {
				t.Errorf("errors: %v", p.errs)
			}
			if got := keysOf(p.objects); !cmp.Equal(got, tt.want) {
				t.Errorf("objects %v, want %v", got, tt.want)
			}
			if len(p.notes) != tt.notes {
				t.Errorf("notes %q, want %d", p.notes, tt.notes)
			}
		})
	}
}

// Nested aliases that would expand to millions of nodes are not expanded.
func TestAliasBomb(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: List\na0: &a0 {kind: Pod, metadata: {name: x}}\n")
	for i := range 40 {
		fmt.Fprintf(&b, "a%d: &a%d {kind: List, items: [*a%d, *a%d]}\n", i+1, i+1, i, i)
	}
	b.WriteString("items: [*a40, *a40]\n")
	if p := parseFile("bomb.yaml", []byte(b.String())); len(p.errs) == 0 {
		t.Error("no error")
	}
}
