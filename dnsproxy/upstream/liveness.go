package upstream

import (
	"crypto/tls"
	"errors"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A server that does not answer a query may be dead, or may be waiting for the nameservers
// of the query's name, which are dead. Probes tell the two apart: they are questions that a
// living server answers at once, whatever other nameservers do.
//
// Each round has several probes, since no question is answered like this by all servers. With
// dead nameservers behind them, dnsmasq 2.90 and unbound 1.17 answer both questions of
// probeQuestions, and neither answers ". NS", which CoreDNS's health check asks. CoreDNS
// itself answers for all classes other than IN. Other servers answer the last question that
// they had an answer to.

// A probe tells which question of a round of probes an attempt is.
type probe uint8

const (
	noProbe    probe = iota
	probeOwn         // a question of probeQuestions
	probePlain       // the first of probeQuestions, without the OPT record that probeOwn has
	probeKnown       // the last question that the server had an answer to
)

// ednsSize is the payload size in bytes that a probe offers.
const ednsSize = 1232

// probeQuestions returns the questions that servers answer themselves, in wire form: the
// address of localhost (RFC 6761, section 6.3), and the server's identity (RFC 4892).
func probeQuestions() [2][]byte {
	return [2][]byte{
		newQuestion([]byte("\x09localhost\x00"), dns.TypeA, dns.ClassINET),
		newQuestion([]byte("\x02id\x06server\x00"), dns.TypeTXT, dns.ClassCHAOS),
	}
}

// probeLiveness sends a round of probes, over a connection if stream is set. One question is sent
// with and without an OPT record, since some middleboxes drop packets that have one.
func (s *server) probeLiveness(now time.Time, stream bool) {
	s.mu.Lock()
	known := append([]byte(nil), s.known...)
	s.mu.Unlock()
	own := probeQuestions()
	s.probeWith(own[0], attempt{probe: probeOwn, edns: true, sent: now, stream: stream})
	s.probeWith(own[0], attempt{probe: probePlain, sent: now, stream: stream})
	s.probeWith(own[1], attempt{probe: probeOwn, sent: now, stream: stream})
	if len(known) > 0 {
		s.probeWith(known, attempt{probe: probeKnown, edns: true, sent: now, stream: stream})
	}
}

// probeWith sends one probe, with the properties of an attempt that like has.
func (s *server) probeWith(question []byte, like attempt) {
	packet := newQuery(question)
	if like.edns {
		wire.PutCount(packet, wire.AdditionalSection, 1)
		packet = wire.AppendOPT(packet, ednsSize, 0)
	}
	a := s.client.newAttempt(s)
	a.probe, a.edns, a.sent, a.stream = like.probe, like.edns, like.sent, like.stream || s.udp == nil
	a.question = append(a.question, question...)
	s.requests.Add(1)
	s.carrier(a.stream).send(a, packet)
}

// refuses reports whether an error is a sign that the server does not serve. A timeout is
// not, nor is an error of this host.
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
