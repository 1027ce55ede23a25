package dnsproxy_test

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/table"
)

// For every push, a table is built or refused, deterministically, and every name that it
// lists is answered.
func FuzzTable(f *testing.F) { // N7, N10
	for _, h := range contested() {
		f.Add(h.wire(f), "shop", "cluster.local")
	}
	f.Add([]byte("\xff"), "a.b", "*.")
	p := newProxy(f, dnsproxy.Config{})
	f.Fuzz(func(t *testing.T, wire []byte, namespace, domain string) {
		push, err := digest.Split(wire)
		cluster, invalid := table.NewCluster(namespace, domain)
		if err != nil || invalid != nil {
			return
		}
		one, err := table.Empty(cluster).With(push)
		two, again := table.Empty(cluster).With(push)
		if err != nil || again != nil {
			if err == nil || again == nil || err.Error() != again.Error() {
				t.Fatalf("one push: %v, then %v", err, again)
			}
		} else if text := tableText(t, one); text != tableText(t, two) {
			t.Fatalf("one push, two tables:\n%s\n%s", text, tableText(t, two))
		}
		if p.Load(push) != nil {
			return
		}
		for key := range p.Table().Infos {
			suffix, wildcard := strings.CutPrefix(key, "*.")
			name := key
			if wildcard {
				name = "f." + suffix
			}
			if e := explain(t, p, name+" A"); e.Rule == table.RuleNone || e.Host != key && !wildcard && !strings.HasSuffix(key, ".") {
				t.Errorf("%q is listed, and answered by %s of %q", key, e.Rule, e.Host)
			}
		}
	})
}

// After any packet the server still works, and whatever it sends is a response.
func FuzzQuery(f *testing.F) { // A10
	for _, req := range []*dns.Msg{
		question("web", dns.TypeA),
		withEDNS(question("web.shop.svc.cluster.local.corp.example", dns.TypeANY), 4096),
		question("1.0.0.10.in-addr.arpa", dns.TypePTR),
		question("_http._tcp.peer.corp.example", dns.TypeSRV),
		question("10-2-0-1.peer", dns.TypeA),
		question("other.example", dns.TypeTXT),
		new(dns.Msg).SetNotify("example."),
		new(dns.Msg).SetUpdate("example."),
	} {
		packet, err := req.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(packet)
	}
	f.Add([]byte{0})
	p := start(f, dnsproxy.Config{Forward: forward.Config{ResolvConf: resolvConf(f, "search corp.example")}, Version: "1", ID: "x"})
	p.load(f, hosts{
		"web.shop.svc.cluster.local":  service("web", "shop", addrs(1, 60)...),
		"*.wild.example":              external("192.0.2.1", "2001:db8::1"),
		"peer.shop.svc.cluster.local": withPorts(headless("peer", "shop", addrs(2, 60)...), "http=80"),
	})
	good, err := question("web.shop.svc.cluster.local", dns.TypeAAAA).Pack()
	if err != nil {
		f.Fatal(err)
	}
	conn, err := net.Dial("udp", p.addr("udp"))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = conn.Close() })
	probe := uint16(0)
	f.Fuzz(func(t *testing.T, packet []byte) {
		if len(packet) > dns.MinMsgSize*8 || len(packet) == 0 {
			return
		}
		write(t, conn, packet)
		probe++
		if binary.BigEndian.Uint16(append(packet[:len(packet):len(packet)], 0)) == probe {
			probe++
		}
		binary.BigEndian.PutUint16(good, probe)
		buf := make([]byte, dns.MaxMsgSize)
		for range 600 {
			write(t, conn, good) // again, in case the fuzzed packet filled a buffer
			if err := conn.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
				t.Fatal(err)
			}
			for {
				n, err := conn.Read(buf)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				resp := parse(t, buf[:n])
				if !resp.Response || n > 1232 {
					t.Errorf("% x is answered with %d bytes:\n%v", packet, n, resp)
				}
				if resp.Id == probe {
					return
				}
			}
		}
		t.Errorf("after % x no query is answered", packet)
	})
}
