package dnsproxy_test

import (
	"encoding/binary"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

func TestQuestionCount(t *testing.T) { // A10
	t.Parallel()
	p, fake := startMesh(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	q := question("web", dns.TypeA).Question[0]
	for _, questions := range [][]dns.Question{nil, {q, q}, {q, q, q}} {
		for _, network := range []string{"udp", "tcp"} {
			req := question("web", dns.TypeA)
			req.Question = questions
			if resp := p.exchange(t, network, req); resp.Rcode != dns.RcodeFormatError || len(resp.Answer) > 0 {
				t.Errorf("%d questions over %s: want FORMERR:\n%v", len(questions), network, resp)
			}
		}
	}
	// A question that the header counts and the packet lacks.
	for _, tail := range []string{"", "\x03web", "\x40web\x00\x00\x01\x00\x01", "\xc0\x0c\x00\x01\x00\x01"} {
		packet := append([]byte{7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0}, tail...)
		if resp := parse(t, p.send(t, "udp", packet)); resp.Rcode != dns.RcodeFormatError || resp.Id != 0x0707 {
			t.Errorf("% x: want FORMERR:\n%v", packet, resp)
		}
	}
	wantAsked(t, 0, fake)
}

func TestDropped(t *testing.T) { // A10
	t.Parallel()
	p, _ := startMesh(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	response := question("web", dns.TypeA)
	response.Response = true
	packed, err := response.Pack()
	if err != nil {
		t.Fatal(err)
	}
	good, err := question("web", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	dropped := 0.0
	for _, network := range []string{"udp", "tcp"} {
		conn := p.dial(t, network)
		for _, packet := range [][]byte{{0}, good[:11], packed, make([]byte, 5)} {
			write(t, conn, packet)
			dropped++
			p.await(t, "nametap_dns_dropped_total", dropped)
		}
		write(t, conn, good) // the only packet that is answered
		if resp := parse(t, read(t, conn)); resp.Id != binary.BigEndian.Uint16(good) {
			t.Errorf("%s: an answer to what is no query:\n%v", network, resp)
		}
		_ = conn.Close()
	}
}

func TestClasses(t *testing.T) { // A10
	t.Parallel()
	fake := nameserver(t, fakedns.Answer())
	p := start(t, dnsproxy.Config{Version: "nametap 1.2", ID: "web-0", Forward: forward.Config{Upstreams: servers(fake)}})
	p.load(t, hosts{"web.shop.svc.cluster.local": service("web", "shop", "10.0.0.1")})
	ask := func(name string, qtype, class uint16) *dns.Msg {
		req := withEDNS(question(name, qtype), 1232)
		req.Question[0].Qclass = class
		return p.exchange(t, "udp", req)
	}
	for name, want := range map[string]string{
		"version.bind": "nametap 1.2", "Version.Server": "nametap 1.2", "id.server": "web-0", "HOSTNAME.bind": "web-0",
		"Agent.nametap": "nametap 1.2 web-0",
	} {
		resp := ask(name, dns.TypeTXT, dns.ClassCHAOS)
		txt, ok := append(resp.Answer, &dns.A{})[0].(*dns.TXT)
		if !ok || txt.Txt[0] != want || txt.Hdr.Class != dns.ClassCHAOS || txt.Hdr.Name != name+"." {
			t.Errorf("%s: want %q:\n%v", name, want, resp)
		}
	}
	for _, refused := range []*dns.Msg{
		ask("authors.bind", dns.TypeTXT, dns.ClassCHAOS),
		ask("version.bind", dns.TypeA, dns.ClassCHAOS),
		ask("web", dns.TypeA, dns.ClassHESIOD),
		ask("web", dns.TypeA, dns.ClassANY),
		ask("web", dns.TypeA, 0),
		ask("other.example", dns.TypeA, 77),
	} {
		if refused.Rcode != dns.RcodeRefused || ede(refused) == nil {
			t.Errorf("want REFUSED and why:\n%v", refused)
		}
	}
	wantAsked(t, 0, fake)
	refuser := start(t, dnsproxy.Config{})
	req := question("version.bind", dns.TypeTXT)
	req.Question[0].Qclass = dns.ClassCHAOS
	if resp := refuser.exchange(t, "udp", req); resp.Rcode != dns.RcodeRefused {
		t.Errorf("without a version: want REFUSED:\n%v", resp)
	}
}
