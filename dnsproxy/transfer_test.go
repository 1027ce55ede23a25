package dnsproxy_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

const (
	tsigName   = "transfer."
	tsigSecret = "bm90IGEgc2VjcmV0IGF0IGFsbA=="
)

// zoneServer starts a nameserver that allows transfers of corp.example, a zone with serial
// 3 that takes many messages.
func zoneServer(t *testing.T) netip.AddrPort {
	t.Helper()
	record := func(format string, args ...any) dns.RR {
		rr, err := dns.NewRR(fmt.Sprintf(format, args...))
		if err != nil {
			t.Error(err)
		}
		return rr
	}
	soa := func(serial int) dns.RR {
		return record("corp.example. 60 IN SOA ns.corp.example. root.corp.example. %d 60 60 60 60", serial)
	}
	send := func(w dns.ResponseWriter, query *dns.Msg, messages ...[]dns.RR) {
		envelopes := make(chan *dns.Envelope, len(messages))
		for _, records := range messages {
			envelopes <- &dns.Envelope{RR: records}
		}
		close(envelopes)
		if err := new(dns.Transfer).Out(w, query, envelopes); err != nil {
			t.Error(err)
		}
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &dns.Server{
		Listener: listener, TsigSecret: map[string]string{tsigName: tsigSecret},
		ReadTimeout: time.Hour, IdleTimeout: func() time.Duration { return time.Hour },
	}
	server.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		if query.IsTsig() != nil && w.TsigStatus() != nil {
			t.Error(w.TsigStatus())
		}
		zone := [][]dns.RR{{soa(3)}}
		for n := range 5 {
			var hosts []dns.RR
			for i := range 500 {
				hosts = append(hosts, record("w%d-%d.corp.example. 60 IN A 192.0.2.1", n, i))
			}
			zone = append(zone, hosts)
		}
		zone = append(zone, []dns.RR{soa(3)})
		changes := [][]dns.RR{
			{soa(3), soa(1)}, {record("old.corp.example. 60 IN A 192.0.2.1"), soa(2), record("mid.corp.example. 60 IN A 192.0.2.1")},
			{soa(2)}, {record("mid.corp.example. 60 IN A 192.0.2.1"), soa(3), record("new.corp.example. 60 IN A 192.0.2.1")}, {soa(3)},
		}
		question := query.Question[0]
		switch {
		case question.Name != "corp.example.":
			_ = w.WriteMsg(new(dns.Msg).SetRcode(query, dns.RcodeRefused))
		case question.Qtype == dns.TypeAXFR:
			send(w, query, zone...)
		case query.Ns[0].(*dns.SOA).Serial == 1:
			send(w, query, changes...)
		case query.Ns[0].(*dns.SOA).Serial == 3:
			send(w, query, []dns.RR{soa(3)})
		default:
			send(w, query, zone...)
		}
	})
	started := make(chan struct{})
	server.NotifyStartedFunc = func() { close(started) }
	ended := make(chan error, 1)
	go func() { ended <- server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() { _ = errors.Join(server.Shutdown(), <-ended) }) // no more queries are sent
	return netip.MustParseAddrPort(listener.Addr().String())
}

// Zone transfers are relayed completely, signed or not.
func TestZoneTransfers(t *testing.T) { // F1
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{{Addr: zoneServer(t)}}}})
		for _, signed := range []bool{false, true} {
			for name, test := range map[string]struct {
				query   func(*dns.Msg)
				records int
			}{
				"AXFR":                 {func(m *dns.Msg) { m.SetAxfr("corp.example.") }, 2502},
				"IXFR":                 {func(m *dns.Msg) { m.SetIxfr("corp.example.", 1, "ns.", "root.") }, 10},
				"IXFR of what is new":  {func(m *dns.Msg) { m.SetIxfr("corp.example.", 3, "ns.", "root.") }, 1},
				"IXFR of what is lost": {func(m *dns.Msg) { m.SetIxfr("corp.example.", 2, "ns.", "root.") }, 2502},
			} {
				query := new(dns.Msg)
				test.query(query)
				conn := p.dial(t, "tcp")
				transfer := &dns.Transfer{Conn: &dns.Conn{Conn: conn}, ReadTimeout: time.Hour, WriteTimeout: time.Hour}
				if signed {
					transfer.TsigSecret = map[string]string{tsigName: tsigSecret}
					query.SetTsig(tsigName, dns.HmacSHA256, 300, time.Now().Unix())
				}
				envelopes, err := transfer.In(query, p.addr("tcp"))
				if err != nil {
					t.Fatal(err)
				}
				records := 0
				for envelope := range envelopes {
					if envelope.Error != nil {
						t.Errorf("%s, signed %v: %v", name, signed, envelope.Error)
					}
					records += len(envelope.RR)
				}
				if records != test.records {
					t.Errorf("%s, signed %v: %d records, want %d", name, signed, records, test.records)
				}
				conn.Close()
			}
		}
		refused := new(dns.Msg)
		refused.SetAxfr("other.example.")
		if resp := p.exchange(t, "tcp", refused); resp.Rcode != dns.RcodeRefused {
			t.Errorf("%v", resp)
		}
		p.converse(t, []dialogue{{"web A", webAddress}})
	})
}

// A transfer that breaks off ends with SERVFAIL.
func TestBrokenZoneTransfer(t *testing.T) { // F1
	synctest.Test(t, func(t *testing.T) {
		p := startForwarder(t, dnsproxy.Config{Forward: forward.Config{Upstreams: []upstream.Spec{deadServer(t)}}})
		query := withEDNS(question("corp.example", dns.TypeAXFR), 1232)
		resp := p.exchange(t, "tcp", query)
		if e := ede(resp); resp.Rcode != dns.RcodeServerFailure || e == nil || !strings.Contains(e.ExtraText, "refused") {
			t.Errorf("%v", resp)
		}
	})
}
