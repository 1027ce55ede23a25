// Package fakedns is a nameserver for tests and for the demo. A Handler makes its replies.
// Effects change, delay or lose the replies, in the order in which they are given:
//
//	upstream, err := fakedns.Start(fakedns.Answer("example.com. 60 IN A 192.0.2.1"))
//	defer upstream.Close()
//
//	upstream.Handle(fakedns.Truncate(fakedns.Size(4000)),
//		fakedns.OnUDP(fakedns.Loss(0.3, 1)), fakedns.Delay(20*time.Millisecond))
//	upstream.Handle(fakedns.Answer(), fakedns.First(fakedns.WrongQuestion))
//
// It records the queries and their source addresses, except with the option Forget. The options On,
// NoUDP and NoTCP select its sockets.
package fakedns

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/miekg/dns"
)

// A Handler returns the reply to a query, which came over network "udp", "tcp" or
// "tls". A nil reply means silence. Each query has a goroutine of its own, so a
// handler may be called several times at once.
type Handler func(query *dns.Msg, network string) *dns.Msg

// A Query is a question that a Server has received.
type Query struct {
	Name    string // in the question's case
	Type    uint16
	Network string // "udp", "tcp" or "tls"
}

// A Server listens on a port of a loopback address, UDP and TCP. Its methods may
// be called from any goroutine.
type Server struct {
	// Addr is the server's address. It does not change after Listen.
	Addr netip.AddrPort

	noUDP, noTCP bool
	forgets      bool
	tls          *tls.Config // nil for plain TCP

	mu          sync.Mutex
	handler     Handler
	effects     []Effect
	queries     []Query
	connections int
	sockets     *sockets // nil while closed
}

// An Option configures the sockets of a Server.
type Option func(*Server)

// On makes the server listen on addr instead of a free port of 127.0.0.1. Port 0 is a free
// port.
func On(addr netip.AddrPort) Option { return func(s *Server) { s.Addr = addr } }

// NoUDP makes the kernel refuse UDP packets with ICMP errors. The port stays reserved. For
// a port that takes packets and never answers, see Silence.
func NoUDP(s *Server) { s.noUDP = true }

// NoTCP makes the kernel refuse connections. The port stays reserved.
func NoTCP(s *Server) { s.noTCP = true }

// AllNetworks ends NoUDP and NoTCP.
func AllNetworks(s *Server) { s.noUDP, s.noTCP = false, false }

// Forget makes the server record no queries: it can then answer any number of queries.
func Forget(s *Server) { s.forgets = true }

// A TB is the part of testing.TB that this package needs. The demo uses the package, too, and must
// not link package testing.
type TB interface {
	Helper()
	Fatal(args ...any)
	Cleanup(f func())
}

// Start starts a server that answers by handler, and closes it when the test ends.
func Start(tb TB, handler Handler, options ...Option) *Server {
	tb.Helper()
	s, err := Listen(handler, options...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.Close)
	return s
}

// Listen starts a server that answers by handler. The caller must close it.
func Listen(handler Handler, options ...Option) (*Server, error) {
	s := &Server{Addr: netip.MustParseAddrPort("127.0.0.1:0"), handler: handler}
	for _, option := range options {
		option(s)
	}
	if err := s.Restart(); err != nil {
		return nil, err
	}
	s.Addr = s.sockets.addr
	return s, nil
}

// Restart starts a closed server again on the same address, with its recorded queries and
// its effects. Options change its sockets. It fails if another process uses the port.
func (s *Server) Restart(options ...Option) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sockets != nil {
		return fmt.Errorf("starting a fake nameserver on %s: it is running", s.Addr)
	}
	for _, option := range options {
		option(s)
	}
	syscall.ForkLock.Lock() // until it executes its program, a child of this process has the closed sockets, too
	sockets, err := s.listen()
	syscall.ForkLock.Unlock()
	if err != nil {
		return fmt.Errorf("starting a fake nameserver on %s: %w", s.Addr, err)
	}
	s.sockets = sockets
	sockets.serve(s)
	return nil
}

// Close stops the server, and returns when its goroutines have ended, including handlers
// that still run. It drops the replies that an effect holds back.
func (s *Server) Close() {
	s.mu.Lock()
	sockets := s.sockets
	s.sockets = nil
	s.mu.Unlock()
	if sockets != nil {
		sockets.close()
	}
}

// Handle replaces the handler and the effects.
func (s *Server) Handle(handler Handler, effects ...Effect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handler, s.effects = handler, effects
}

// Queries returns the queries since the start or the last Reset, in order, including
// queries whose reply an effect has lost. It leaves out the probes of clients
// (localhost. A, id.server. in class CH, and probes for loops), because they can arrive at any time on a busy machine.
func (s *Server) Queries() []Query {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.queries)
}

// Connections returns the number of connections that were accepted since the start or the
// last Reset, with or without a TLS handshake.
func (s *Server) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connections
}

// Disconnect closes all connections of clients. The server keeps listening.
func (s *Server) Disconnect() {
	s.mu.Lock()
	sockets := s.sockets
	s.mu.Unlock()
	if sockets != nil {
		sockets.disconnect()
	}
}

// Reset clears the recorded queries and the number of connections.
func (s *Server) Reset() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queries, s.connections = nil, 0
}

// connected counts a connection.
func (s *Server) connected() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connections++
}

// record stores the questions and returns the current handler and effects.
func (s *Server) record(r Request) (Handler, []Effect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range r.Msg.Question {
		if s.forgets || isProbe(q) {
			continue
		}
		s.queries = append(s.queries, Query{Name: q.Name, Type: q.Qtype, Network: r.Network})
	}
	return s.handler, s.effects
}

// isProbe reports whether a question is the client's own, as a probe is: see [Server.Queries].
func isProbe(q dns.Question) bool {
	return q.Name == "localhost." && q.Qtype == dns.TypeA || q.Name == "id.server." && q.Qclass == dns.ClassCHAOS ||
		q.Name == "ipv4only.arpa." && q.Qtype == dns.TypeAAAA || strings.HasSuffix(q.Name, ".nametap-loop-probe.")
}

// replies returns the packets for a query, sorted by their time.
func (s *Server) replies(r Request) []Packet {
	handler, effects := s.record(r)
	var packets []Packet
	if reply := handler(r.Msg, r.Network); reply != nil {
		wire, err := reply.Pack()
		if err != nil {
			panic(fmt.Sprintf("fakedns: a handler's reply cannot be packed: %v\n%v", err, reply))
		}
		packets = []Packet{{Bytes: wire}}
	}
	for _, effect := range effects {
		packets = effect(r, packets)
	}
	slices.SortStableFunc(packets, func(a, b Packet) int { return cmp.Compare(a.After, b.After) })
	return packets
}
