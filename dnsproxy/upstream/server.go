package upstream

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/wire"
)

// A carrier carries queries to a server and its replies back.
type carrier interface {
	// send sends packet, whose ID it chooses, and owns the attempt from then on: it
	// ends it exactly once, perhaps before send returns. It does not keep packet.
	send(a *attempt, packet []byte)
	// sweep ends attempts that have had no reply in time and closes idle sockets.
	sweep(now time.Time)
	// retireFrom retires the socket with a local address, and reports whether there is one.
	retireFrom(local netip.AddrPort) bool
	// close ends all attempts and closes all sockets; their goroutines end soon after.
	close()
}

// A server is a nameserver, with its sockets and its history.
type server struct {
	spec   Spec
	name   string // of spec
	client *Client
	udp    carrier // nil for TLS
	stream carrier

	elsewhere bool         // it is not configured; never changes
	alone     *Group       // that has only this server; guarded by the client's mutex
	evicted   atomic.Bool  // it was removed from the client's elsewhere
	open      atomic.Int64 // sockets and connections
	owes      atomic.Int64 // queries that were sent and are remembered, without a reply so far

	requests, failures, wrong, malformed, hedges atomic.Uint64

	strayed atomic.Pointer[time.Time] // when the last packet came that was no reply to a query in flight; nil for never

	mu          sync.Mutex
	history     history
	options     Options        // of the last group that it was put into
	nextProbe   probe          // question of the next probe
	known       []byte         // last question that had an answer, in wire form; empty if there is none
	responses   [rcodes]uint64 // by the index of the response code in rcodeNames
	refused     refusals
	turned      time.Time // when it was last logged that this began or ended
	lastError   string
	lastErrorAt time.Time
	barred      bool // see Status.Barred
	overTCP     overTCP
	loggedDown  bool // the last line in the log reports it as down

	loopProbe  time.Time // when the last one was sent
	loopProbes int       // sent in short succession
	redirected int       // loop probes in a row that the kernel redirected to the agent
}

// overTCP is what became of the queries over TCP to a server that is also queried over UDP, since its last reply
// over TCP.
type overTCP struct {
	first, last time.Time // failures; zero if there is none
	err         string    // the last one
}

// carrier returns the server's connections if stream is set, else its UDP sockets.
func (s *server) carrier(stream bool) carrier {
	if stream || s.udp == nil {
		return s.stream
	}
	return s.udp
}

// rtt returns how long replies take, smoothed; zero before the first one.
func (s *server) rtt() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.srtt
}

// standing returns the server's standing, and logs when it goes down. It probes the server if
// that is due.
func (s *server) standing(now time.Time) standing {
	s.mu.Lock()
	st := s.history.standing(now) // without the probe that is due now
	st.full = s.history.silence(now) > s.history.patience() && s.owes.Load() >= maxSilent
	due := s.history.probeDue(now, s.options.Fastest, st.full)
	fell := st.state == Down && !s.loggedDown
	s.loggedDown = s.loggedDown || fell
	silence, lastError := s.history.silence(now), s.lastError
	if s.lastErrorAt.Before(s.history.silentSince) {
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

// follow makes the server follow the options of a group that it is put into.
func (s *server) follow(options Options) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options = options
}

// maxSilent is how many queries a server that leaves a probe unanswered may owe replies to until it is full (rule 7).
const maxSilent = 128

// refusesAll reports whether queries that only this server could answer fail at once: it is full, and has been
// silent for downSilence.
func (s *server) refusesAll(now time.Time) bool {
	if s.owes.Load() < maxSilent {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.silence(now) >= downSilence
}

// lateAfter returns when the server is late (rule 1).
func (s *server) lateAfter() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.lateAfter()
}

// sent notes a query.
func (s *server) sent(now time.Time) {
	s.requests.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history.sent(now)
}

// replied notes the reply to an attempt.
func (s *server) replied(a *attempt, now time.Time, r reading) {
	rtt := now.Sub(a.sent)
	s.mu.Lock()
	s.barred = false
	if a.stream {
		s.overTCP = overTCP{}
	}
	s.history.replied(now, rtt, r)
	if a.probe != noProbe {
		s.nextProbe = a.probe
	} else if r.usable() && !r.negative && a.opcode == 0 {
		s.known = append(s.known[:0], a.question...)
	}
	rose := s.loggedDown
	s.loggedDown = false
	turned := a.probe == noProbe && a.loopProbe == nil && !r.other && s.countLocked(a, r) && now.Sub(s.turned) >= turnedEvery
	if turned {
		s.turned = now
	}
	refusing, lastError := s.refused.all(), s.lastError
	s.mu.Unlock()
	switch {
	case rose:
		s.logs(slog.LevelInfo, "nameserver answers again")
	case turned && refusing:
		s.logs(slog.LevelWarn, "nameserver answers no query any more, but for refusals", slog.String("last_error", lastError))
	case turned:
		s.logs(slog.LevelInfo, "nameserver answers queries again")
	}
	if s.client.config.Observe != nil {
		s.client.config.Observe(s.spec, rtt)
	}
}

// turnedEvery is how often it is logged at most that a server gives no answers.
const turnedEvery = time.Minute

// A server gives no answers after refusingAfter replies in a row that were none, to names of refusingDomains: all names
// of one domain fail if its own nameservers do.
const (
	refusingAfter   = 10
	refusingDomains = 3
)

// refusals are the replies of a server in a row that were no answer.
type refusals struct {
	count   int
	domains []wire.Name // the last two labels of names, refusingDomains at most
}

// all reports whether the server gives no answers.
func (f *refusals) all() bool { return f.count >= refusingAfter && len(f.domains) == refusingDomains }

// add counts a reply to a question in wire form.
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

// questionTail is the length of the root label, the type and the class of a question.
const questionTail = 5

// rcodes is the number of keys of Status.Responses.
const rcodes = 7

// rcodeNames returns the keys of Status.Responses.
func rcodeNames() [rcodes]string {
	return [...]string{"NOERROR", "NXDOMAIN", "SERVFAIL", "REFUSED", "NOTIMP", "FORMERR", "other"}
}

// rcodeIndex returns the index of a response code in rcodeNames.
func rcodeIndex(code int) int {
	for i, named := range [...]int{
		dns.RcodeSuccess, dns.RcodeNameError, dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented, dns.RcodeFormatError,
	} {
		if code == named {
			return i
		}
	}
	return rcodes - 1
}

// refuses reports whether the last replies to queries were no answers.
func (s *server) refuses() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused.all()
}

// countLocked counts a reply to a query, and reports whether with it the server has begun, or has ceased, to give no
// answers. A server that gets only what others have failed for may answer all other questions.
func (s *server) countLocked(a *attempt, r reading) (turned bool) {
	before := s.refused.all()
	if r.err == nil {
		s.responses[rcodeIndex(r.code)]++
	}
	if r.usable() {
		s.refused = refusals{domains: s.refused.domains[:0]}
	} else if !a.second {
		s.refused.add(a.question)
	}
	return s.refused.all() != before
}

// failed notes an attempt that got no reply.
func (s *server) failed(a *attempt, err error) {
	s.failures.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	if errors.Is(err, net.ErrClosed) { // the socket was retired
		return
	}
	now := time.Now()
	s.lastError, s.lastErrorAt, s.barred = err.Error(), now, errors.Is(err, syscall.EPERM)
	if a.stream && s.udp != nil {
		if s.overTCP.first.IsZero() {
			s.overTCP.first = now
		}
		s.overTCP.last, s.overTCP.err = now, err.Error()
	}
	// A server that does not accept connections may still answer over UDP.
	if refuses(err) && (!a.stream || s.udp == nil) && a.probe == noProbe {
		s.history.refused(a.sent)
	}
}

// stray counts a packet that is no reply to a query in flight.
func (s *server) stray(counter *atomic.Uint64) {
	counter.Add(1)
	now := time.Now()
	s.strayed.Store(&now)
}

// strayedSince reports whether such a packet came after a time.
func (s *server) strayedSince(since time.Time) bool {
	at := s.strayed.Load()
	return at != nil && at.After(since)
}

// noteMalformed notes a malformed reply.
func (s *server) noteMalformed(err error) {
	s.malformed.Add(1)
	s.note(err.Error())
}

// note keeps the last error for Status.
func (s *server) note(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lastError, s.lastErrorAt = text, time.Now()
}

// plain reports whether the server is to be asked without EDNS.
func (s *server) plain(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return now.Before(s.history.plainUntil)
}

// dropsEDNS reports whether no reply with an OPT record has come since a time.
func (s *server) dropsEDNS(since time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.history.ednsHeard.Before(since)
}

func (s *server) answeredPlain(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history.answeredPlain(now)
}

// status returns the server's element of Client.Status.
func (s *server) status(now time.Time) Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	responses := make(map[string]uint64, rcodes)
	for i, name := range rcodeNames() {
		responses[name] = s.responses[i]
	}
	tcp := TCPStatus{Since: s.overTCP.first, LastError: s.overTCP.err, LastErrorAt: s.overTCP.last}
	return Status{
		TCP: tcp, Spec: s.spec, State: s.history.standing(now).state, RTT: s.history.srtt,
		Requests: s.requests.Load(), Failures: s.failures.Load(), Wrong: s.wrong.Load(),
		Malformed: s.malformed.Load(), Hedges: s.hedges.Load(), LastError: s.lastError,
		LastErrorAt: s.lastErrorAt, Barred: s.barred, Responses: responses, Refusing: s.refused.all(),
	}
}

// sweep sweeps the server's sockets. Until a server that owes replies has sent one or is down, it is
// probed even if no query follows; then sweep reports true.
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
