package dnsproxy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// withPorts adds ports to an entry, in the form NAME=NUMBER/PROTOCOL; without a protocol TCP.
func withPorts(info *api.NameTable_NameInfo, ports ...string) *api.NameTable_NameInfo {
	for _, text := range ports {
		p := &api.NameTable_Port{}
		name, rest, _ := strings.Cut(text, "=")
		number, protocol, _ := strings.Cut(rest, "/")
		if _, err := fmt.Sscan(number, &p.Number); err != nil {
			panic(text)
		}
		p.Name, p.Protocol = name, protocol
		info.Ports = append(info.Ports, p)
	}
	return info
}

// sections formats the answer and the additional section of a response, each sorted, and checks
// what all answers with ports have in common.
func sections(t *testing.T, resp *dns.Msg) (answer, additional []string) {
	t.Helper()
	if resp.Rcode != dns.RcodeSuccess || !resp.Authoritative {
		t.Errorf("want NOERROR and AA:\n%v", resp)
	}
	for _, rr := range slices.Concat(resp.Answer, resp.Ns, resp.Extra) {
		if h := rr.Header(); h.Rrtype != dns.TypeOPT && (h.Ttl != 30 || h.Class != dns.ClassINET) {
			t.Errorf("want TTL 30 and class IN: %v", rr)
		}
	}
	for _, rr := range resp.Answer {
		answer = append(answer, record(rr))
	}
	for _, rr := range resp.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			additional = append(additional, record(rr))
		}
	}
	if len(answer) > 0 && strings.Contains(answer[0], " CNAME ") {
		slices.Sort(answer[1:])
	} else {
		slices.Sort(answer)
	}
	slices.Sort(additional)
	return answer, additional
}

// A serviceCase is an SRV query, and the sections of its answer.
type serviceCase struct {
	ask                string
	answer, additional []string
}

// wantServices sends the queries over both transports and compares the answers.
func (p *proxy) wantServices(t *testing.T, cases []serviceCase) {
	t.Helper()
	for _, c := range cases {
		for _, network := range []string{"udp", "tcp"} {
			resp := p.exchange(t, network, withEDNS(question(c.ask, dns.TypeSRV), 1232))
			answer, additional := sections(t, resp)
			if diff := cmp.Diff([][]string{c.answer, c.additional}, [][]string{answer, additional}); diff != "" || len(resp.Ns) > 0 {
				t.Errorf("%s over %s (-want +got):\n%s\n%v", c.ask, network, diff, resp)
			}
		}
	}
}

const (
	srvWeb  = "web.shop.svc.cluster.local."
	srvDual = "dual.bank.svc.cluster.local."
	srvDNS  = "dns.bank.svc.cluster.local."
)

func serviceHosts() hosts {
	return hosts{
		"web.shop.svc.cluster.local":  withPorts(service("web", "shop", "10.0.0.1"), "http=80", "metrics=9090/TCP", "=7/UDP"),
		"dual.bank.svc.cluster.local": withPorts(service("dual", "bank", "10.0.0.2", "2001:db8::2"), "h2=443"),
		"dns.bank.svc.cluster.local":  withPorts(service("dns", "bank", "10.0.0.3"), "dns=53/UDP", "dns-tcp=53", "sig=2905/SCTP"),
		"none.shop.svc.cluster.local": service("none", "shop", "10.0.0.4"),
		"api.example.com":             withPorts(withDestinations(external("192.0.2.1"), "80"), "http=80"),
	}
}

// The ports of a Service with a cluster IP have SRV records that lead to the Service.
func TestServices(t *testing.T) { // D22
	t.Parallel()
	p, fake := startMesh(t, serviceHosts())
	a := []string{srvWeb + " A 10.0.0.1"}
	http := func(owner string) []string { return []string{owner + " SRV 0 100 80 " + srvWeb} }
	const httpWeb = "_http._tcp." + srvWeb
	p.wantServices(t, []serviceCase{
		{httpWeb, http(httpWeb), a},
		{"_HTTP._Tcp.WEB.shop.svc.cluster.local.", http("_HTTP._Tcp.WEB.shop.svc.cluster.local."), a},
		{"_metrics._tcp." + srvWeb, []string{"_metrics._tcp." + srvWeb + " SRV 0 100 9090 " + srvWeb}, a},
		// By a short name, and with a search domain.
		{"_http._tcp.web", append([]string{"_http._tcp.web. CNAME " + httpWeb}, http(httpWeb)...), a},
		{httpWeb + "shop.svc.cluster.local.", append([]string{httpWeb + "shop.svc.cluster.local. CNAME " + httpWeb}, http(httpWeb)...), a},
		// Both families; CoreDNS counts the addresses for the weight.
		{"_h2._tcp." + srvDual, []string{"_h2._tcp." + srvDual + " SRV 0 50 443 " + srvDual},
			[]string{srvDual + " A 10.0.0.2", srvDual + " AAAA 2001:db8::2"}},
		{"_sig._sctp." + srvDNS, []string{"_sig._sctp." + srvDNS + " SRV 0 100 2905 " + srvDNS}, []string{srvDNS + " A 10.0.0.3"}},
		// Of the Service itself: all ports, the unnamed one included; a number once.
		{srvWeb, []string{srvWeb + " SRV 0 33 7 " + srvWeb, srvWeb + " SRV 0 33 80 " + srvWeb, srvWeb + " SRV 0 33 9090 " + srvWeb}, a},
		{srvDNS, []string{srvDNS + " SRV 0 33 2905 " + srvDNS, srvDNS + " SRV 0 33 53 " + srvDNS}, []string{srvDNS + " A 10.0.0.3"}},
	})
	p.converse(t, []dialogue{
		// The name of a port has the addresses of the Service, too.
		{httpWeb + " A", httpWeb + " A 10.0.0.1"},
		{"_http._tcp.web.shop.shop.svc.cluster.local. A", "_http._tcp.web.shop.shop.svc.cluster.local. CNAME " + httpWeb + "; " + httpWeb + " A 10.0.0.1"},
		{"none SRV", "NODATA none."}, // a table without ports, such as istiod's
	})
	wantAsked(t, 0, fake)
	for _, name := range []string{"_http._tcp.none", "_http._tcp.", "_http.", "_http._tcp.api.example.com"} {
		p.converse(t, []dialogue{{name + " SRV", forwarded}})
	}
	p.converse(t, []dialogue{{"api.example.com SRV", "NODATA api.example.com."}})
	fake.Reset()
	// Below a Service whose ports are known there is nothing else.
	for _, name := range []string{"_http._udp.", "_https._tcp.", "_._udp.", "__tcp.", "http.tcp.", "x._http._tcp.", "_grpc_config."} {
		p.converse(t, []dialogue{{name + srvWeb + " SRV", "NXDOMAIN"}, {name + srvWeb + " TXT", "NXDOMAIN"}})
	}
	p.converse(t, []dialogue{{"_tcp." + srvWeb + " A", "NODATA cluster.local."}, {"_tcp.web A", "NODATA web."}})
	for _, owner := range []string{"web.", "web.shop.", srvWeb + "corp.example.", srvWeb + "shop.svc.cluster.local.", "web.shop.shop.svc.cluster.local."} {
		p.converse(t, []dialogue{{"_grpc_config." + owner + " TXT", "NXDOMAIN"}, {"_x._tcp." + owner + " SRV", "NXDOMAIN"}})
	}
	wantAsked(t, 0, fake)
	fake.Handle(fakedns.Rcode(dns.RcodeServerFailure))
	p.converse(t, []dialogue{{"_grpc_config.web.corp.example TXT", "NXDOMAIN"}, {"_grpc_config.api.example.com TXT", "SERVFAIL"}})
}

// cname returns the records of a short name of one of the agent's Services.
func cname(short string, records ...string) []string {
	return append([]string{short + ". CNAME " + short + ".shop.svc.cluster.local."}, records...)
}

// All pods of a Deployment may have one host name: then one of very many endpoints is a target.
func TestServicesOfOneHostName(t *testing.T) { // D22
	t.Parallel()
	const pod = "pod.web.shop.svc.cluster.local."
	p, _ := startMesh(t, hosts{
		"web.shop.svc.cluster.local":     withPorts(headless("web", "shop", addrs(1, 2000)...), "http=80"),
		"pod.web.shop.svc.cluster.local": service("pod.web", "shop", addrs(1, 2000)...),
	})
	for range 20 {
		resp := p.ask(t, srvWeb, dns.TypeSRV)
		if len(resp.Answer) != 1 || resp.Answer[0].(*dns.SRV).Target != pod {
			t.Errorf("want %s, got\n%v", pod, resp)
		}
	}
}

// Each endpoint of a headless Service has SRV records, with the name of its pod or its address.
func TestServicesOfEndpoints(t *testing.T) { // D22, D21
	t.Parallel()
	const web, two = "web.shop.svc.cluster.local.", "two.shop.svc.cluster.local."
	twoPorts := withPorts(headless("two", "shop", "10.244.2.1", "10.244.2.2", "10.244.2.3"), "http=8080", "http=8081", "admin=9000")
	twoPorts.Ports[0].Ips = []string{"10.244.2.1", "10.244.2.9"}
	twoPorts.Ports[1].Ips = []string{"10.244.2.2", "10.244.2.3"}
	twoPorts.Ports[2].Ips = []string{"10.244.2.1"}
	p, fake := startMesh(t, hosts{
		"web.shop.svc.cluster.local":       withPorts(headless("web", "shop", "10.244.1.7", "10.244.1.8", "2001:db8::7", "2001:db8::8"), "http=8080", "grpc=9090"),
		"web-0.web.shop.svc.cluster.local": service("web-0.web", "shop", "10.244.1.8", "2001:db8::8"),
		"two.shop.svc.cluster.local":       twoPorts,
		"bare.shop.svc.cluster.local":      headless("bare", "shop", "10.244.3.1"),
	})
	targets := func(owner string, weight, port int) []string {
		rest := fmt.Sprintf(" SRV 0 %d %d ", weight, port)
		return []string{
			owner + rest + "10-244-1-7." + web, owner + rest + "2001-db8--7." + web, owner + rest + "web-0." + web,
		}
	}
	addresses := []string{
		"10-244-1-7." + web + " A 10.244.1.7", "2001-db8--7." + web + " AAAA 2001:db8::7",
		"web-0." + web + " A 10.244.1.8", "web-0." + web + " AAAA 2001:db8::8",
	}
	const pod = "web-0." + web
	p.wantServices(t, []serviceCase{
		{"_http._tcp." + web, targets("_http._tcp."+web, 25, 8080), addresses},
		{"_grpc._tcp.web", cname("_grpc._tcp.web", targets("_grpc._tcp."+web, 25, 9090)...), addresses},
		{"web", cname("web", append(targets(web, 12, 8080), targets(web, 12, 9090)...)...), addresses},
		// Of one endpoint.
		{pod, []string{pod + " SRV 0 25 8080 " + pod, pod + " SRV 0 25 9090 " + pod}, addresses[2:]},
		{"10-244-1-7.web", cname("10-244-1-7.web", "10-244-1-7."+web+" SRV 0 50 8080 10-244-1-7."+web, "10-244-1-7."+web+" SRV 0 50 9090 10-244-1-7."+web), addresses[:1]},
		// Endpoints with different ports.
		{"_http._tcp." + two, []string{
			"_http._tcp." + two + " SRV 0 33 8080 10-244-2-1." + two, "_http._tcp." + two + " SRV 0 33 8081 10-244-2-2." + two,
			"_http._tcp." + two + " SRV 0 33 8081 10-244-2-3." + two,
		}, []string{"10-244-2-1." + two + " A 10.244.2.1", "10-244-2-2." + two + " A 10.244.2.2", "10-244-2-3." + two + " A 10.244.2.3"}},
	})
	// Every target is a name with these addresses.
	resp := p.exchange(t, "tcp", question(two, dns.TypeSRV))
	for _, rr := range resp.Answer {
		target := rr.(*dns.SRV).Target
		if got := p.ask(t, target, dns.TypeA); len(got.Answer) != 1 {
			t.Errorf("the target %s:\n%v", target, got)
		}
	}
	p.converse(t, []dialogue{
		{"bare SRV", "NODATA bare."},
		{"_http._tcp." + two + " A", "_http._tcp." + two + " A 10.244.2.1; _http._tcp." + two + " A 10.244.2.2; _http._tcp." + two + " A 10.244.2.3"},
	})
	wantAsked(t, 0, fake)
	p.converse(t, []dialogue{{"_http._tcp." + pod + " SRV", forwarded}, {"_http._tcp.10-244-1-7.web SRV", forwarded}})
}

// Ports that are not valid are left out, and the other ones stay.
func TestBadPorts(t *testing.T) { // D22, N10
	t.Parallel()
	label := strings.Repeat("l", 63)
	p, _ := startMesh(t, hosts{
		"web.shop.svc.cluster.local": withPorts(service("web", "shop", "10.0.0.1"),
			"http=80", "a.b=81", label+"=82", "*=83", "zero=0", "high=65536", "quic=443/QUIC", "http=80/tcp", "HTTP=8080/UDP", label[1:]+"=84"),
		"*.wild.example":             withPorts(service("x", "shop", "10.0.0.2"), "http=80"),
		"old.shop.svc.cluster.local": withPorts(alias("old", "web.shop.svc.cluster.local", "10.0.0.1"), "http=80"),
	})
	p.wantServices(t, []serviceCase{
		{srvWeb, []string{srvWeb + " SRV 0 33 80 " + srvWeb, srvWeb + " SRV 0 33 8080 " + srvWeb, srvWeb + " SRV 0 33 84 " + srvWeb}, []string{srvWeb + " A 10.0.0.1"}},
		{"_http._udp.web", cname("_http._udp.web", "_http._udp."+srvWeb+" SRV 0 100 8080 "+srvWeb), []string{srvWeb + " A 10.0.0.1"}},
		{"_" + label[1:] + "._tcp." + srvWeb, []string{"_" + label[1:] + "._tcp." + srvWeb + " SRV 0 100 84 " + srvWeb}, []string{srvWeb + " A 10.0.0.1"}},
	})
	p.converse(t, []dialogue{
		{"x.wild.example SRV", "NODATA x.wild.example."}, {"_http._tcp.old SRV", forwarded},
	})
	if got := p.Table().Skipped(); len(got) != 7 {
		t.Errorf("left out: %v, want seven ports", got)
	}
}
