package push

import (
	"crypto/rand"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/api/digest"
	"github.com/nametap/nametap/discovery/hosts"
)

// A session is an ADS stream. A client that has requested name tables wants all of them, until the stream ends. It has at
// most one push in flight: it is sent the latest state when it has answered the last push.
type session struct {
	service *Service
	variant string
	// send queues a response, and does not wait for the client. gRPC's queue always has room, because it is empty: the
	// client has answered the last push, so the client has received all of that push, with the nonce at its end.
	send    func(encoded any) error
	check   func(node *corev3.Node, namespace string) error // see [Config.Check]; nil checks nothing
	timeout *time.Timer                                     // ends the stream of a client that does not answer in time
	done    <-chan struct{}                                 // closed when the stream has ended
	fail    func(error)                                     // ends the stream
	queued  atomic.Bool                                     // it is in the queue of the broadcaster
	info    atomic.Pointer[subscriber]                      // what the client says of itself; nil before the first request

	// Where the client connects from, and since when.
	peer      string
	tls       bool
	connected time.Duration // a time as in the type record

	mu      sync.Mutex // guards the fields up to record
	joined  bool       // a request for name tables was read
	nonce   string     // of the last push
	pending bool       // the last push is not answered yet
	owed    bool       // the next push is sent even if nothing is new
	// accepted is the table that the client has, and sent the one that it has if it accepts the last push. rejected is the
	// last one that it has rejected: it is not sent again, because the client would reject it again. All may be nil.
	accepted, sent, rejected *table
	foreign                  []string // names of further resources that the client has and must remove
	record                   record

	// The fields below are guarded by tables.mu.

	view *view // nil until joined is set
	// woken is the time of the first change that was not sent to the client, in the form of the type record; 0 if there is
	// none.
	woken time.Duration
}

func (s *session) delta() bool { return s.variant == variantDelta }

// handle handles a request, and sends what the client does not have. The error ends the stream.
func (s *session) handle(r *Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.handleLocked(r); err != nil {
		return err
	}
	return s.pushLocked()
}

func (s *session) handleLocked(r *Request) error {
	if r.used > maxUsed {
		return status.Errorf(codes.ResourceExhausted, "a request has %d bytes, without extensions and resources of other types: want at most %d", r.used, maxUsed)
	}
	if err := s.identify(r.node); err != nil {
		return err
	}
	if r.rejection != nil {
		s.service.rejected(s.variant, s.said().node, r.rejection.GetMessage())
	}
	if r.typeURL != TypeURL {
		// Istio's agent forwards the subscriptions of its Envoy. An error would end the
		// stream, and with it the pushes of name tables.
		return nil
	}
	answers := r.nonce != "" && r.nonce == s.nonce
	if r.nonce != "" && !answers && !s.delta() && s.joined {
		return nil // it answers an earlier push; the answer to the last push follows
	}
	first := !s.joined
	if first {
		s.service.awaitFirstRead(s.done)
		if err := s.service.tables.join(s); err != nil {
			return err
		}
		s.joined = true
		s.announce(r)
		s.timeout.Stop()
	}
	if answers {
		s.answer(r)
	}
	again := r.nonce == "" && !s.delta() && !first // the client subscribes again, and expects everything
	s.owed = s.owed || first || again
	return nil
}

// announce notes which table the client has at the start of the stream.
func (s *session) announce(r *Request) {
	now, _, _ := s.service.tables.current(s)
	switch one := r.versions; {
	case s.said().named:
		s.accepted, s.foreign = announced(r.versions, now)
	case len(one) == 1 && len(one[0][0]) == 0 && string(one[0][1]) == now.digest():
		s.accepted = now
	}
	s.sent = s.accepted
}

// answer notes the answer of the client to the last push.
func (s *session) answer(r *Request) {
	s.pending = false
	s.timeout.Stop()
	now := s.service.tables.elapsed()
	if r.rejection != nil {
		s.sent, s.rejected = s.accepted, s.sent
		s.record.nacked, s.record.reason = now, cut(r.rejection.GetMessage())
	} else {
		s.accepted, s.rejected, s.foreign = s.sent, nil, nil
		s.record.acked = now
	}
}

// identify stores what the node of the first request says. It checks this node, and the node of every later request that
// has one.
func (s *session) identify(node *corev3.Node) error {
	if s.info.Load() != nil && (node == nil || s.check == nil) {
		return nil
	}
	client, err := parseNode(node)
	if err != nil {
		return err
	}
	if s.check != nil {
		if err := s.check(node, client.view.Namespace); err != nil {
			return err
		}
	}
	client.named = client.named && s.delta()
	s.info.CompareAndSwap(nil, &client)
	return nil
}

// push sends what the client does not have. It returns an error if the stream has ended.
func (s *session) push() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pushLocked()
}

// A push with maxSmall bytes or more that no other push has used counts as large. Most pushes are smaller, and are sent
// without a call of Config.Room.
const maxSmall = 64 << 10

// pushLocked sends what the client does not have, unless the client's answer to the last push is awaited.
func (s *session) pushLocked() error {
	if !s.joined || s.pending {
		return nil
	}
	now, of, own := s.service.tables.current(s)
	if s.rejected != nil && now.equals(s.rejected) && !s.owed {
		return nil
	}
	p := s.missing(now, of)
	if len(p.resources)+len(p.removed) == 0 && !s.owed {
		return nil
	}
	size := 0
	for _, e := range p.unused {
		size += len(e.table)
	}
	if own && size >= maxSmall && s.service.cfg.Room != nil {
		if err := s.service.cfg.Room(); err != nil {
			s.fail(err)
			return err
		}
	}
	for _, e := range p.unused {
		e.used.Store(true)
	}
	s.sent = now
	s.nonce, s.pending, s.owed, s.record.pushed = rand.Text(), true, false, s.service.tables.elapsed() // only a client that has read the nonce can answer
	s.service.metrics.pushes.WithLabelValues(s.variant).Inc()
	s.timeout.Reset(s.service.cfg.AckTimeout)
	return s.send(newResponse(&p, s.nonce))
}

// missing returns what the client lacks of a table.
func (s *session) missing(now *table, of *source) (p push) {
	encoded := func(number int) *encoded {
		e := s.service.tables.encoded(of, now, number)
		if !e.used.Load() {
			p.unused = append(p.unused, e)
		}
		return e
	}
	switch changed, gone := now.since(s.sent); {
	case s.said().named:
		p.removed = slices.Clone(s.foreign)
		for _, i := range gone {
			p.removed = append(p.removed, nameOf(i))
		}
		for _, i := range changed {
			p.resources = append(p.resources, &encoded(i).resource)
		}
	case s.sent == nil, len(changed)+len(gone) > 0, s.owed && !s.delta():
		for i := range digest.Count {
			if now.shard(i) != nil {
				p.resources = append(p.resources, &encoded(i).table)
			}
		}
		p.version = now.digest()
		p.resources = newWhole(s.delta(), p.version, p.resources)
	}
	return p
}

// end ends the session.
func (s *session) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.timeout.Stop(); s.joined {
		s.service.tables.leave(s)
		s.joined = false // the broadcaster may be about to push
	}
}

// viewer returns the viewer of the client, with the Sidecar and the place that scene has for the client.
func (s *session) viewer(scene *hosts.Scene) hosts.Viewer {
	v := s.said().view
	v.Sidecar = scene.Sidecar(v.Namespace, s.said().labels)
	v.Place = scene.Place(s.said().cluster, s.said().network)
	return scene.Viewer(v)
}

// wake notes that something may have changed for the client. The caller holds tables.mu.
func (s *session) wake(now time.Duration) {
	if s.woken == 0 {
		s.woken = now
	}
}

// said returns what the client says of itself; nothing before the first request.
func (s *session) said() *subscriber {
	if info := s.info.Load(); info != nil {
		return info
	}
	return &subscriber{}
}

// state returns the state of the client. The result open is false if the stream has ended.
func (s *session) state() (a Agent, open bool) {
	info := s.said()
	select {
	case <-s.done:
		return a, false
	default:
	}
	a = Agent{
		Replica: s.service.cfg.Replica, Namespace: info.view.Namespace, Name: info.name, ID: info.node, Software: info.software,
		Address: s.peer, TLS: s.tls, Variant: s.variant, Mode: modeWhole, State: StateWaiting,
	}
	if info.named {
		a.Mode = modeNamed
	}
	now := s.service.tables.elapsed()
	a.ConnectedSeconds, a.Behind = seconds(now-s.connected), now-s.connected >= behindAfter
	t := s.service.tables
	t.mu.Lock()
	joined := s.view != nil
	t.mu.Unlock()
	// Until the client has joined, s.mu may be held for long, so it is not locked here.
	return a, !joined || s.stateOfTable(&a)
}

// stateOfTable sets the fields of a that describe the client's table. The client must have requested the table. The
// result open is false if the stream has ended.
func (s *session) stateOfTable(a *Agent) (open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.joined {
		return false
	}
	t := s.service.tables
	t.mu.Lock()
	served, viewer, woken := s.view.table, s.view.viewer, s.woken
	t.mu.Unlock()
	now := t.elapsed()
	a.Digest, a.ServedDigest, a.Hosts = s.accepted.digest(), served.digest(), served.hosts()
	a.View, a.Current = describe(&viewer), a.Digest == a.ServedDigest
	a.LastPushSeconds, a.LastAckSeconds = ago(now, s.record.pushed), ago(now, s.record.acked)
	if s.record.nacked > 0 {
		a.Nack = &Nack{Reason: s.record.reason, Seconds: seconds(now - s.record.nacked)}
	}
	a.State = s.judgeLocked(now, woken, a.Current)
	a.Behind = a.State == StateUnanswered || a.State == StateRejected || a.State == StateUnsent
	return true
}

// judgeLocked returns the state of a client that has requested its table. The parameter current is true if the client
// has the current table. The parameter woken is the time of the first change that was not sent to the client; 0 if
// there is none.
func (s *session) judgeLocked(now, woken time.Duration, current bool) AgentState {
	r := &s.record
	switch {
	case s.pending && now-r.pushed >= behindAfter:
		return StateUnanswered
	case current:
		return StateCurrent
	case r.nacked > r.acked:
		return StateRejected
	case s.pending, woken > 0 && now-woken < behindAfter:
		return StateUpdating
	}
	return StateUnsent
}

// A record has the times of the last push, the last ACK and the last NACK of a session. Times are counted from the
// start of the service; 0 means never. A record is guarded by session.mu.
type record struct {
	pushed, acked, nacked time.Duration
	reason                string // of the last NACK
}
