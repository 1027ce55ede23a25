package upstream

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clock"
)

// A carrier carries queries to a server and its replies back.
type carrier interface {
	// send chooses an ID, writes it into packet and sends packet. The carrier owns the attempt from then on, and ends
	// it exactly once, from another goroutine. If send returns an error, it has not taken over the attempt. It does
	// not keep packet.
	send(a *attempt, packet []byte) error
	// sweep ends attempts that have had no reply in time and closes idle sockets.
	sweep(now time.Time)
	// close ends all attempts and closes all sockets; their goroutines end soon after.
	close()
}

// A server is a nameserver, with its sockets and its history.
type server struct {
	spec   Spec
	name   string // the text of spec
	client *Client
	udp    carrier // nil for TLS
	stream carrier

	elsewhere bool         // it is not configured; never changes
	single    *Group       // the group of this server alone; guarded by the client's mutex
	evicted   atomic.Bool  // it was removed from the client's elsewhere
	owes      atomic.Int64 // how many queries were sent, are still in memory, and have no reply so far

	mu         sync.Mutex
	known      Status    // its counters, and its last errors
	strayed    time.Time // when the last packet came that was no reply to a query in flight
	history    history
	options    Options // options of the group that the server was put into last
	refused    refusals
	loggedDown bool // the last line in the log reports it as down

	loopProbed time.Time // when the last loop probe was sent
	redirected int       // loop probes in a row that the kernel redirected to the agent
}

// carrier returns the server's connections if stream is set, else its UDP sockets.
func (s *server) carrier(stream bool) carrier {
	if stream || s.udp == nil {
		return s.stream
	}
	return s.udp
}

// protocol returns the name of the protocol over which a query is sent.
func (s *server) protocol(stream bool) string {
	switch {
	case s.spec.TLS:
		return "tls"
	case stream:
		return "tcp"
	}
	return "udp"
}

// reserveSocket counts a socket that is about to be opened. If the goroutine that sweeps sockets is not running,
// reserveSocket starts it. It returns an error if the server must not have another socket. If the caller cannot open
// the socket, it must call releaseSocket.
func (s *server) reserveSocket() error {
	c := s.client
	if s.elsewhere {
		if c.elsewhereOpen.Add(1) > maxElsewhereSockets {
			c.elsewhereOpen.Add(-1)
			return ErrCrowded
		}
	}
	c.open.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed && !c.sweeping {
		c.sweeping = true
		c.goroutines.Go(c.sweep)
	}
	return nil
}

// releaseSocket ends the counting of a socket that was closed, or could not be opened.
func (s *server) releaseSocket() {
	s.client.open.Add(-1)
	if s.elsewhere {
		s.client.elsewhereOpen.Add(-1)
	}
}

// rtt returns how long replies take, smoothed; zero before the first reply.
func (s *server) rtt() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.srtt
}

// standing returns the server's standing, and logs when the server goes down. It sends a probe if
// one is due.
func (s *server) standing(now time.Time) standing {
	s.mu.Lock()
	st := s.history.standing(now) // the probe that is due now does not count yet
	due := s.history.probeDue(now, s.options.Fastest)
	fell := st.state == Down && !s.loggedDown
	s.loggedDown = s.loggedDown || fell
	silence, lastError := s.history.silence(now), s.known.LastError
	if s.known.LastErrorAt.Before(s.history.silentSince) {
		lastError = ErrTimeout.Error()
	}
	s.mu.Unlock()
	if fell {
		s.logs(slog.LevelWarn, "nameserver is down", slog.Duration("silent", silence), slog.String("last_error", lastError))
	}
	if due {
		s.sendProbe(now)
	}
	return st
}

// maxSilent is how many queries a server that is down may owe replies to.
const maxSilent = 128

// full reports whether the server is full: it is down and owes replies to many queries (rule 7).
func (s *server) full(now time.Time) bool {
	return s.owes.Load() >= maxSilent && s.standing(now).state == Down
}

// lateAfter returns how long after a query the server is late (rule 1).
func (s *server) lateAfter() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.lateAfter()
}

// sent notes a query. repeated is true if it is sent because a server is late.
func (s *server) sent(now time.Time, repeated bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known.Requests++
	if repeated {
		s.known.Hedges++
	}
	s.history.sent(now)
}

// replied notes the reply to an attempt.
func (s *server) replied(a *attempt, now time.Time, r reading) {
	rtt := now.Sub(a.sent)
	s.mu.Lock()
	s.known.Barred = false
	if a.stream {
		s.known.TCP = TCPStatus{Heard: now}
	}
	s.history.replied(now, rtt, r)
	rose := s.loggedDown
	s.loggedDown = false
	if a.question != nil && !r.other {
		s.countLocked(a, r)
	}
	s.mu.Unlock()
	if rose {
		s.logs(slog.LevelInfo, "nameserver answers again")
	}
	if s.client.config.Observe != nil {
		s.client.config.Observe(s.spec, rtt)
	}
}

// countLocked counts a reply to a query. A failure does not count for refused.all if another server has failed for the
// same question: the reason may be the question.
func (s *server) countLocked(a *attempt, r reading) {
	if r.err == nil {
		s.known.Responses[rcodeKey(r.code)]++
	}
	if r.usable() {
		s.refused = refusals{domains: s.refused.domains[:0]}
	} else if !a.failedForOthers {
		s.refused.add(a.text)
		s.known.RefusedAt = time.Now()
	}
}

// failed notes an attempt that got no reply.
func (s *server) failed(a *attempt, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known.Failures++
	if errors.Is(err, net.ErrClosed) { // the socket was retired
		return
	}
	now := time.Now()
	s.known.LastError, s.known.LastErrorAt, s.known.Barred = err.Error(), now, errors.Is(err, syscall.EPERM)
	if a.stream && s.udp != nil {
		tcp := &s.known.TCP
		if tcp.Since.IsZero() {
			tcp.Since = now
		}
		tcp.LastError, tcp.LastErrorAt = err.Error(), now
	}
	// A server that does not accept connections may still answer over UDP.
	if refuses(err) && (!a.stream || s.udp == nil) && a.question != nil {
		s.history.refused(a.sent)
	}
}

// refuses reports whether the server gives no answers (refusals.all).
func (s *server) refuses() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused.all()
}

// stray notes a packet that is no reply to a query in flight. malformed is true if it is no response at all.
func (s *server) stray(malformed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strayed = time.Now()
	if malformed {
		s.known.Malformed++
	} else {
		s.known.Wrong++
	}
}

// strayedSince reports whether a packet that stray notes has come after start.
func (s *server) strayedSince(start time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.strayed.After(start)
}

// setLastError sets the last error, for Status.
func (s *server) setLastError(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known.LastError, s.known.LastErrorAt = text, time.Now()
}

// sendProbe sends a probe (rule 2). If a server does not answer a query, there are two possible reasons. The server is
// dead, or it waits for other nameservers, which are dead. Probes distinguish these cases: they are questions that a
// living server answers at once, whatever other nameservers do.
//
// A probe asks two questions, because no question is answered at once by all servers. If their own nameservers are
// dead, dnsmasq 2.90 and unbound 1.17 still answer both. Neither answers ". NS", which CoreDNS's health check asks.
// CoreDNS itself answers at once for all classes other than IN.
func (s *server) sendProbe(now time.Time) {
	for _, question := range probeQuestions() {
		s.sendAttempt(&attempt{server: s, sent: now, text: question})
	}
}

func probeQuestions() [2][]byte {
	return [...][]byte{
		wire.AppendQuestion(nil, "\x02id\x06server", dns.TypeTXT, dns.ClassCHAOS), // the server's identity (RFC 4892)
		wire.AppendQuestion(nil, wire.Localhost, dns.TypeA, dns.ClassINET),        // RFC 6761, section 6.3
	}
}

// sendAttempt sends the question of a probe. Probes go over TCP only with use-vc or TLS: a server that answers over UDP is
// alive, even if TCP to it is blocked.
func (s *server) sendAttempt(a *attempt) {
	s.mu.Lock()
	s.known.Requests++
	a.stream = s.udp == nil || s.options.UseVC
	s.mu.Unlock()
	if err := s.carrier(a.stream).send(a, wire.NewQuery(a.text)); err != nil {
		a.end(nil, err)
	}
}

// askTries is how often ask sends a probe, and askPause how long each may be unanswered.
const (
	askTries = 3
	askPause = 700 * time.Millisecond
)

// ask sends probes until there is a reply, and notes that there is none.
func (s *server) ask(ctx context.Context) {
	began := time.Now()
	for range askTries {
		s.sendProbe(time.Now())
		for sent := time.Now(); time.Since(sent) < askPause; {
			s.mu.Lock()
			heard := !s.history.heard.Before(began)
			s.mu.Unlock()
			if heard || !clock.Sleep(ctx, askPause/100) {
				return
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known.Unanswered = time.Now()
	if s.known.LastErrorAt.Before(began) {
		s.known.LastError, s.known.LastErrorAt = ErrTimeout.Error(), s.known.Unanswered
	}
}

// logs logs a line, unless a client has chosen the server.
func (s *server) logs(level slog.Level, text string, attrs ...slog.Attr) {
	if !s.elsewhere {
		s.client.config.Logger.LogAttrs(context.Background(), level, text, append(attrs, slog.String("server", s.name))...)
	}
}

// status returns the server's element of Client.Status.
func (s *server) status(now time.Time) Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.known
	known.Looping = s.history.looping
	known.Spec, known.State, known.RTT = s.spec, s.history.standing(now).state, s.history.srtt
	known.Heard, known.Refusing, known.Responses = s.history.heard, s.refused.all(), maps.Clone(known.Responses)
	return known
}

// sweep sweeps the server's sockets. If the server owes replies and is not down, sweep reports true. In this case it
// also probes the server if a probe is due, because there may be no further query that would do so.
func (s *server) sweep(now time.Time) (owes bool) {
	if s.udp != nil {
		s.udp.sweep(now)
	}
	s.stream.sweep(now)
	s.mu.Lock()
	owes = s.history.owes() && !s.loggedDown
	s.mu.Unlock()
	if owes {
		s.standing(now)
	}
	return owes
}

func (s *server) close() {
	if s.udp != nil {
		s.udp.close()
	}
	s.stream.close()
}

// A server is said to refuse all queries after refusingAfter failures in a row, for names of refusingDomains
// different domains. If all failures are for names of one domain, the domain's own nameservers may be the reason.
const (
	refusingAfter   = 10
	refusingDomains = 3
)

// refusals counts the failures that a server has sent in a row, without an answer between them.
type refusals struct {
	count   int
	domains []wire.Name // the last two labels of each name that failed; at most refusingDomains
}

// all reports whether the server refuses all queries, as far as is known.
func (f *refusals) all() bool { return f.count >= refusingAfter && len(f.domains) == refusingDomains }

// add counts a failure for a question in wire form.
func (f *refusals) add(question []byte) {
	f.count++
	if len(f.domains) == refusingDomains || len(question) < questionTail {
		return
	}
	domain := wire.Fold(question[:len(question)-questionTail])
	for domain != wire.Root && domain.Parent() != wire.Root && domain.Parent().Parent() != wire.Root {
		domain = domain.Parent()
	}
	if !slices.Contains(f.domains, domain) {
		f.domains = append(f.domains, domain)
	}
}

// questionTail is the length of what follows the name's labels in a question: the root label, the type and the class.
const questionTail = 5

// rcodeKey returns the key of a response code in Status.Responses.
func rcodeKey(code int) string {
	switch code {
	case dns.RcodeSuccess, dns.RcodeNameError, dns.RcodeServerFailure, dns.RcodeRefused:
		return wire.RcodeName(code)
	}
	return "other"
}
