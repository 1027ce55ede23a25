package lab

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/miekg/dns"
)

// A Conduct is the behaviour of an upstream.
type Conduct struct {
	// Silent makes the nameserver read queries and not answer them.
	Silent bool
	// Loss is the probability that a reply is lost, over UDP.
	Loss float64
}

// An Upstream is a nameserver in this process. All names in ExternalDomain and in
// wildcardDomain have one address of each family; no other name exists.
type Upstream struct {
	packets *net.UDPConn
	streams *dns.Server
	conduct atomic.Pointer[Conduct]
	Asked   atomic.Int64
	running sync.WaitGroup
}

// StartUpstream starts an upstream that answers. The caller must close it.
func StartUpstream(addr netip.AddrPort) (*Upstream, error) {
	packets, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(addr))
	if err != nil {
		return nil, fmt.Errorf("starting a nameserver: %w", err)
	}
	_ = packets.SetReadBuffer(4 << 20) // for bursts, if the system allows it
	streams, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(addr))
	if err != nil {
		_ = packets.Close() // nothing was sent
		return nil, fmt.Errorf("starting a nameserver: %w", err)
	}
	u := &Upstream{packets: packets}
	u.Behave(Conduct{})
	u.streams = &dns.Server{Listener: streams, MaxTCPQueries: -1, Handler: dns.HandlerFunc(u.serveDNS)}
	u.running.Go(u.servePackets)
	started := make(chan struct{})
	u.streams.NotifyStartedFunc = func() { close(started) }
	u.running.Go(func() { _ = u.streams.ActivateAndServe() }) // ends with close
	<-started
	return u, nil
}

// Close stops the nameserver.
func (u *Upstream) Close() {
	_ = u.packets.Close()
	_ = u.streams.Shutdown()
	u.running.Wait()
}

// Behave changes the behaviour for later queries.
func (u *Upstream) Behave(c Conduct) { u.conduct.Store(&c) }

// servePackets answers over UDP, one query after the other, at once or not at all.
func (u *Upstream) servePackets() {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, from, err := u.packets.ReadFromUDPAddrPort(buf)
		if err != nil {
			return // closed
		}
		u.Asked.Add(1)
		c := u.conduct.Load()
		if c.Silent || rand.Float64() < c.Loss {
			continue
		}
		query := new(dns.Msg)
		if query.Unpack(buf[:n]) != nil {
			continue
		}
		wire, err := respond(query).Pack()
		if err != nil {
			continue
		}
		_, _ = u.packets.WriteToUDPAddrPort(wire, from) // the client may have ended
	}
}

// serveDNS answers over TCP.
func (u *Upstream) serveDNS(w dns.ResponseWriter, query *dns.Msg) {
	u.Asked.Add(1)
	if !u.conduct.Load().Silent {
		_ = w.WriteMsg(respond(query)) // the client may have ended
	}
}

// respond returns the answer to a query. It has an OPT record if the query has one.
func respond(query *dns.Msg) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable = true
	if opt := query.IsEdns0(); opt != nil {
		reply.SetEdns0(1232, opt.Do())
	}
	if len(query.Question) != 1 {
		reply.Rcode = dns.RcodeFormatError
		return reply
	}
	question := query.Question[0]
	name := strings.ToLower(question.Name)
	zone := zoneOf(name)
	exists := zone == ExternalDomain || zone == wildcardDomain
	switch {
	case exists && question.Qtype == dns.TypeA:
		reply.Answer = []dns.RR{&dns.A{Hdr: header(question, 300), A: net.IPv4(192, 0, 2, 1)}}
	case exists && question.Qtype == dns.TypeAAAA:
		reply.Answer = []dns.RR{&dns.AAAA{Hdr: header(question, 300), AAAA: net.ParseIP("2001:db8::1")}}
	default:
		if !exists {
			reply.Rcode = dns.RcodeNameError
		}
		reply.Ns = []dns.RR{&dns.SOA{
			Hdr: dns.RR_Header{Name: zone, Rrtype: dns.TypeSOA, Class: dns.ClassINET, Ttl: 30},
			Ns:  "ns." + ExternalDomain, Mbox: "hostmaster." + ExternalDomain,
			Serial: 1, Refresh: 3600, Retry: 600, Expire: 86400, Minttl: 30,
		}}
	}
	return reply
}

// header returns the header of a record for the question's name and type.
func header(q dns.Question, ttl uint32) dns.RR_Header {
	return dns.RR_Header{Name: q.Name, Rrtype: q.Qtype, Class: dns.ClassINET, Ttl: ttl}
}

// zoneOf returns the zone of a name: the cluster's, an external one or the root.
func zoneOf(name string) string {
	for _, zone := range []string{clusterDomain + ".", ExternalDomain, wildcardDomain} {
		if dns.IsSubDomain(zone, name) {
			return zone
		}
	}
	return "."
}
