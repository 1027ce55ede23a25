// Package fakedns is a nameserver that does what it is told, for tests and for
// the demo: it answers from a function and counts what it was asked.
//
//	upstream, err := fakedns.Start(fakedns.Answer("example.com. 60 IN A 192.0.2.1"))
//	defer upstream.Close()
package fakedns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"

	"github.com/miekg/dns"
)

// A Handler returns the reply to a query, which came over network "udp" or
// "tcp". A nil reply means silence.
type Handler func(query *dns.Msg, network string) *dns.Msg

// A Query is one question that a Server was asked.
type Query struct {
	Name    string // in the question's case
	Type    uint16
	Network string // "udp" or "tcp"
}

// A Server listens on a free port of 127.0.0.1, UDP and TCP. Its methods may be
// called from any goroutine.
type Server struct {
	// Addr is where it listens.
	Addr netip.AddrPort

	udp, tcp *dns.Server

	mu      sync.Mutex
	handler Handler
	queries []Query
}

// Start starts a server that answers by handler. The caller closes it.
func Start(handler Handler) (*Server, error) {
	packets, streams, err := listen()
	if err != nil {
		return nil, fmt.Errorf("starting a fake nameserver: %w", err)
	}
	addr, err := netip.ParseAddrPort(packets.LocalAddr().String())
	if err != nil {
		return nil, fmt.Errorf("starting a fake nameserver: %w", err)
	}
	s := &Server{Addr: addr, handler: handler}
	s.udp = s.serve(&dns.Server{PacketConn: packets, UDPSize: dns.MaxMsgSize})
	s.tcp = s.serve(&dns.Server{Listener: streams, MaxTCPQueries: -1})
	return s, nil
}

// listen opens UDP and TCP on one free port. A port that is free for UDP may be
// taken for TCP, so it tries a few.
func listen() (packets net.PacketConn, streams net.Listener, err error) {
	const attempts = 10
	var config net.ListenConfig
	for range attempts {
		packets, err = config.ListenPacket(context.Background(), "udp4", "127.0.0.1:0")
		if err != nil {
			return nil, nil, err
		}
		streams, err = config.Listen(context.Background(), "tcp4", packets.LocalAddr().String())
		if err == nil {
			return packets, streams, nil
		}
		_ = packets.Close() // nothing was sent
	}
	return nil, nil, err
}

// serve starts one transport and returns once it is being read.
func (s *Server) serve(server *dns.Server) *dns.Server {
	network := "udp"
	if server.Listener != nil {
		network = "tcp"
	}
	started := make(chan struct{})
	server.NotifyStartedFunc = func() { close(started) }
	server.MsgAcceptFunc = func(dns.Header) dns.MsgAcceptAction { return dns.MsgAccept }
	server.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, query *dns.Msg) {
		if reply := s.record(query, network)(query, network); reply != nil {
			_ = w.WriteMsg(reply) // a client that has gone is the test's to notice
		}
	})
	go func() { _ = server.ActivateAndServe() }() // ends with Close; a test sees a dead server
	<-started
	return server
}

// record notes the question and returns the handler of the moment.
func (s *Server) record(query *dns.Msg, network string) Handler {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range query.Question {
		s.queries = append(s.queries, Query{Name: q.Name, Type: q.Qtype, Network: network})
	}
	return s.handler
}

// Handle replaces the handler.
func (s *Server) Handle(handler Handler) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handler = handler
}

// Queries returns what was asked since the start or the last Reset, in order.
func (s *Server) Queries() []Query {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Query(nil), s.queries...)
}

// Reset forgets what was asked.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queries = nil
}

// Close stops the server and returns after its goroutines have.
func (s *Server) Close() {
	for _, server := range []*dns.Server{s.udp, s.tcp} {
		_ = server.Shutdown() // fails only for a server that has already stopped
	}
}

// Answer is a Handler that knows the given records, in presentation form, and
// says NXDOMAIN to names without one and NODATA to types without one. It panics
// if a record cannot be parsed.
func Answer(records ...string) Handler {
	byName := map[string][]dns.RR{}
	for _, record := range records {
		rr, err := dns.NewRR(record)
		if err != nil {
			panic(fmt.Sprintf("fakedns: record %q: %v", record, err))
		}
		name := strings.ToLower(rr.Header().Name)
		byName[name] = append(byName[name], rr)
	}
	return func(query *dns.Msg, _ string) *dns.Msg {
		reply := new(dns.Msg).SetReply(query)
		reply.RecursionAvailable = true
		if len(query.Question) != 1 {
			reply.Rcode = dns.RcodeFormatError
			return reply
		}
		rrs, known := byName[strings.ToLower(query.Question[0].Name)]
		if !known {
			reply.Rcode = dns.RcodeNameError
		}
		for _, rr := range rrs {
			if rr.Header().Rrtype == query.Question[0].Qtype {
				reply.Answer = append(reply.Answer, rr)
			}
		}
		return reply
	}
}

// Rcode is a Handler that answers every query with a response code.
func Rcode(rcode int) Handler {
	return func(query *dns.Msg, _ string) *dns.Msg { return new(dns.Msg).SetRcode(query, rcode) }
}

// Silence is a Handler that never answers.
func Silence(*dns.Msg, string) *dns.Msg { return nil }
