package upstream

import (
	crypto "crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"log/slog"
	"net/netip"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A server that does not answer a query may be dead, or may be waiting for the nameservers
// of the query's name, which are dead. Probes tell the two apart: they are questions that a
// living server answers at once, whatever other nameservers do.
//
// The questions alternate, since no question is answered like this by all servers. With
// dead nameservers behind them, dnsmasq 2.90 and unbound 1.17 answer the first two questions,
// and neither answers ". NS", which CoreDNS's health check asks. CoreDNS itself answers for all
// classes other than IN. Other servers answer the last question that they had an answer to.

// A probe is the question of a probe.
type probe uint8

const (
	noProbe    probe = iota
	probeID          // the server's identity (RFC 4892)
	probeLocal       // the address of localhost (RFC 6761, section 6.3)
	probeKnown       // the last question that the server had an answer to
)

// question returns the question in wire form, empty if there is none.
func (p probe) question(known []byte) []byte {
	switch p {
	case probeLocal:
		return wire.AppendQuestion(nil, wire.Localhost, dns.TypeA, dns.ClassINET)
	case probeKnown:
		return known
	default:
		return wire.AppendQuestion(nil, "\x02id\x06server", dns.TypeTXT, dns.ClassCHAOS)
	}
}

// sendProbe sends a probe (rule 2). It asks what the server has answered last, and if that is
// not answered the next question. A server that answers over UDP is alive, although TCP to it may
// be blocked; so probes go over TCP only with use-vc.
func (s *server) sendProbe(now time.Time) {
	s.mu.Lock()
	asks := max(s.nextProbe, probeID)
	s.nextProbe = asks%probeKnown + 1
	if s.nextProbe == probeKnown && len(s.known) == 0 {
		s.nextProbe = probeID
	}
	question, useVC := append([]byte(nil), asks.question(s.known)...), s.options.UseVC
	s.mu.Unlock()
	a := s.client.newAttempt(s)
	a.probe, a.sent, a.stream = asks, now, s.udp == nil || useVC
	a.question = append(a.question, question...)
	s.requests.Add(1)
	s.carrier(a.stream).send(a, wire.NewQuery(question))
}

// refuses reports whether an error is a sign that the server does not serve. A timeout or
// an error of this host is none.
func refuses(err error) bool {
	for _, sign := range []error{
		syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN,
		errPeerClosed,
	} {
		if errors.Is(err, sign) {
			return true
		}
	}
	var alert tls.AlertError
	var certificate *tls.CertificateVerificationError
	var header tls.RecordHeaderError
	return errors.As(err, &alert) || errors.As(err, &certificate) || errors.As(err, &header)
}

// A loop is detected as by dnsmasq's --dns-loop-detect and CoreDNS's plugin loop: a
// server is asked for a name that no other program knows. If this agent receives the question,
// the server has sent it.

const (
	// LoopZone is the domain of the names that servers are asked for to find loops,
	// which are one label below it. The names have two labels, since forwarders
	// do not forward names of one label. The zone is not one of the special names
	// of RFC 6761, which many do not forward either.
	LoopZone = "nametap-loop-probe."

	probeLen = 16 // bytes; the label has twice as many letters

	// A server that is suspected repeatedly, such as one whose names are slow, is
	// probed after 1 s, 2 s, 4 s and so on up to 64 s. After two minutes without a
	// probe, the next one is sent at once.
	loopProbePause = time.Second
	maxProbes      = 6 // doublings of loopProbePause
	probesForget   = 2 * time.Minute
	loopRecheck    = 10 * time.Second
	probeForgets   = 30 * time.Second

	// maxRedirected is how many probes in a row may be redirected to the agent by chance, since
	// the application has used their ports.
	maxRedirected = 3
)

// redirectedAlways is what the log and the status say if all probes are redirected.
const redirectedAlways = "the capture rules redirect the agent's own queries to the agent: " +
	"run it as a user of --capture-agent-uid or as a group of --capture-agent-gid"

// A loopProbe is a question sent to a server to see whether it comes back.
type loopProbe struct {
	id     [probeLen]byte
	server *server
	sent   time.Time
	// How it came back, guarded by the client's mutex: from the server, or because the kernel
	// redirected this client's own packet to the agent.
	echoed, redirected bool
}

// An Arrival is how the agent received a question.
type Arrival struct {
	// From is the address that the question came from.
	From netip.AddrPort
	// To is the original destination of a captured question that will be forwarded there, and
	// not valid for other questions.
	To netip.AddrPort
}

// loopSuffix is LoopZone in wire form.
func loopSuffix() wire.Name {
	const label = len(LoopZone) - 1
	return wire.Name(append([]byte{byte(label)}, LoopZone[:label]...))
}

// Suspect sends a loop probe to each server of the group for which one is due. The caller
// calls it when it receives a question that servers of the group have
// been asked and not answered yet. It does not block; [Client.Echo] recognises the probes that
// come back.
func (g *Group) Suspect() {
	now := time.Now()
	for _, s := range g.servers {
		if s.loopProbeDue(now) {
			s.sendLoopProbe(now)
		}
	}
}

// loopProbeDue reports whether a suspected server is to be probed, and counts the probe.
// For servers that loop there is loopProbeAgain.
func (s *server) loopProbeDue(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	since := now.Sub(s.loopProbe)
	switch {
	case s.history.looping:
		return false
	case s.loopProbe.IsZero() || since > probesForget:
		s.loopProbes = 0
	case since < loopProbePause<<min(s.loopProbes, maxProbes):
		return false
	default:
		s.loopProbes++
	}
	s.loopProbe = now
	return true
}

// loopProbeAgain probes a server that loops, at most every ten seconds.
func (s *server) loopProbeAgain(now time.Time) {
	s.mu.Lock()
	due := now.Sub(s.loopProbe) >= loopRecheck
	if due {
		s.loopProbe = now
	}
	s.mu.Unlock()
	if due {
		s.sendLoopProbe(now)
	}
}

// sendLoopProbe sends a probe.
func (s *server) sendLoopProbe(now time.Time) {
	probe := &loopProbe{server: s, sent: now}
	_, _ = crypto.Read(probe.id[:]) // cannot fail
	s.client.addProbe(probe)

	name := wire.Name(hex.AppendEncode([]byte{2 * probeLen}, probe.id[:])) + loopSuffix()
	question := wire.AppendQuestion(nil, name, dns.TypeTXT, dns.ClassINET)

	a := s.client.newAttempt(s)
	a.loopProbe, a.sent, a.stream = probe, now, s.udp == nil
	a.question = append(a.question, question...)
	s.requests.Add(1)
	s.carrier(a.stream).send(a, wire.NewQuery(question))
}

// addProbe remembers a probe, and forgets probes that no server will answer any more.
func (c *Client) addProbe(probe *loopProbe) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, old := range c.probes {
		if probe.sent.Sub(old.sent) > probeForgets {
			delete(c.probes, id)
		}
	}
	c.probes[probe.id] = probe
}

// Echo is to be called with the name of every question below [LoopZone] that the agent
// receives.
//
// It reports whether the question is a probe of this client that comes back to be answered here,
// or to be forwarded to the same server again. Then the server loops, except if the question came
// from a socket of this client: without a conntrack zone the kernel takes a query of the agent for
// one of the application that had its port before, and redirects it. That socket is used no more.
// If several probes in a row are redirected, the rules do not let the user of the agent pass, and
// the server counts as one that loops.
// A probe on its way to another server has passed through a forwarder on this host, which is not
// a loop.
// A server that loops is not asked any more until, at least ten seconds later, it answers
// a probe itself. The caller should answer the question with REFUSED, so that it is not sent
// again.
func (c *Client) Echo(name wire.Name, arrival Arrival) bool {
	const label = 2 * probeLen
	var id [probeLen]byte
	if len(name) < 1+label || name[0] != label || name[1+label:] != loopSuffix() {
		return false
	}
	if _, err := hex.Decode(id[:], []byte(name[1:1+label])); err != nil {
		return false
	}
	c.mu.Lock()
	probe := c.probes[id]
	c.mu.Unlock()
	if probe == nil || arrival.To.IsValid() && arrival.To != probe.server.spec.Addr {
		return false
	}
	redirected := probe.server.retireFrom(plain(arrival.From))
	c.mu.Lock()
	probe.echoed, probe.redirected = true, redirected
	c.mu.Unlock()
	switch {
	case !redirected:
		probe.server.setLooping(true, ErrLoop.Error())
	case probe.server.redirectedAgain():
		probe.server.setLooping(true, redirectedAlways)
	}
	return true
}

// redirectedAgain counts a probe that was redirected, and reports whether so many in a row are no
// accident.
func (s *server) redirectedAgain() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.redirected++
	return s.redirected > maxRedirected
}

// retireFrom retires the socket of the server that has a local address, and reports whether there
// is one.
func (s *server) retireFrom(local netip.AddrPort) bool {
	return s.udp != nil && s.udp.retireFrom(local) || s.stream.retireFrom(local)
}

// probeAnswered is called when a probe has a reply, and reports whether the reply is the
// server's: the agent itself replies to a probe that was redirected to it.
func (c *Client) probeAnswered(probe *loopProbe) bool {
	c.mu.Lock()
	echoed, redirected := probe.echoed, probe.redirected
	c.mu.Unlock()
	if !echoed {
		probe.server.setLooping(false, "")
	}
	return !redirected
}

// setLooping notes whether the server loops and why, and logs a change.
func (s *server) setLooping(looping bool, why string) {
	s.mu.Lock()
	changed := s.history.looping != looping
	s.history.looping = looping
	if !looping {
		s.redirected = 0
	}
	s.mu.Unlock()
	switch {
	case changed && looping:
		s.note(why)
		s.logs(slog.LevelWarn, "nameserver is no longer used: "+why)
	case changed:
		s.logs(slog.LevelInfo, "nameserver is used again: its queries no longer come back")
	}
}
