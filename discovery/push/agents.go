package push

import (
	"cmp"
	"fmt"
	"iter"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nametap/nametap/discovery/hosts"
)

// An Agent is the state of a client that has a stream.
type Agent struct {
	// Replica is the replica of the control plane that the client is connected to.
	Replica string `json:"replica"`
	// Namespace, Name and ID are from the node id; Name is the pod, or the host of a VM. All are empty before the
	// first request.
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	ID        string `json:"id"`
	// Address is where the connection comes from. TLS is true if the client has proven its
	// identity.
	Address string `json:"address"`
	TLS     bool   `json:"tls"`
	// Software is the name and the version of the client's program, if it sends them.
	Software string `json:"software"`
	// Mode is what a change sends: "hosts" or "whole". Variant is the ADS variant.
	Mode    string `json:"mode"`
	Variant string `json:"variant"`
	// View describes the clients that see the same hosts.
	View string `json:"view"`
	// The times are in seconds ago; nil means never.
	ConnectedSeconds float64  `json:"connectedSeconds"`
	LastPushSeconds  *float64 `json:"lastPushSeconds"`
	LastAckSeconds   *float64 `json:"lastAckSeconds"`
	// Digest is the checksum of the table that the client has acknowledged last on this stream; "" for none.
	// ServedDigest is the digest of its table now, which has Hosts hosts.
	Digest       string `json:"digest"`
	ServedDigest string `json:"servedDigest"`
	Hosts        int    `json:"hosts"`
	// Current is true if both are equal. Behind is true if they have differed for longer than
	// pushes take.
	Current bool       `json:"current"`
	Behind  bool       `json:"behind"`
	State   AgentState `json:"state"`
	// Nack is the last push that the client has rejected, on this stream or, if that was its last answer there, on its
	// last one; nil for none.
	Nack *Nack `json:"nack"`
}

// A Nack is a push that was rejected.
type Nack struct {
	// Reason is what the client says, at most 256 bytes of it.
	Reason  string  `json:"reason"`
	Seconds float64 `json:"seconds"` // ago
}

// An AgentState tells whether a client has its table and, if not, why.
type AgentState string

// The states of clients.
const (
	StateWaiting      AgentState = "waiting"      // it has requested no table, or there is none for it yet
	StateCurrent      AgentState = "current"      // it has the current table
	StateUpdating     AgentState = "updating"     // it was sent a push, or will be, less than behindAfter ago
	StateUnanswered   AgentState = "unanswered"   // it has not answered the last push for longer
	StateUnsent       AgentState = "unsent"       // it was not sent the current table for longer
	StateRejected     AgentState = "rejected"     // it has rejected the last push that it has answered
	StateUnsubscribed AgentState = "unsubscribed" // it wants no table
)

// behindAfter is how long a client may be without the current table before it is called behind.
// With 10,000 clients, a push to all takes less than a second.
const behindAfter = 10 * time.Second

// The modes of clients, as `nametap status` calls them.
const (
	modeHosts = "hosts"
	modeWhole = "whole"
)

// Agents returns the state of the clients that have a stream, of one namespace or, if that is "",
// of all, sorted by namespace, name, and how long they have been connected. Each state is read when
// the caller takes it: a push waits while one client's state is read, never for the caller.
func (s *Service) Agents(namespace string) iter.Seq[Agent] {
	return func(yield func(Agent) bool) {
		for _, one := range s.streams.sorted(namespace) {
			if a, open := one.state(one.about); open && !yield(a) {
				return
			}
		}
	}
}

// maxNacks is how many clients without a stream there may be whose last answer, a NACK, is kept.
const maxNacks = 1 << 10

// streams are the open streams. An agent whose table does not have the checksum of a push rejects
// the push and connects again, so that its NACK is kept until then.
type streams struct {
	mu    sync.Mutex
	open  map[*session]struct{}
	nacks map[string]nack // by node id
}

func newStreams() *streams { return &streams{open: map[*session]struct{}{}, nacks: map[string]nack{}} }

// keep keeps the NACK of a client whose stream has ended. It drops another one, any, if there are too many.
func (s *streams) keep(id string, last nack) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for other := range s.nacks {
		if len(s.nacks) < maxNacks {
			break
		}
		delete(s.nacks, other)
	}
	s.nacks[id] = last
}

// take returns the NACK of a client, which is not kept any more.
func (s *streams) take(id string) nack {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := s.nacks[id]
	delete(s.nacks, id)
	return last
}

func (s *streams) add(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[one] = struct{}{}
}

func (s *streams) remove(one *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, one)
}

// A listed is a stream and what its client had said of itself when the list was made.
type listed struct {
	*session
	about *about
}

// sorted returns the streams of a namespace, or all.
func (s *streams) sorted(namespace string) []listed {
	s.mu.Lock()
	all := make([]listed, 0, len(s.open))
	for one := range s.open {
		all = append(all, listed{session: one})
	}
	s.mu.Unlock()
	for i := range all {
		if all[i].about = all[i].session.about.Load(); all[i].about == nil {
			all[i].about = &about{}
		}
	}
	if namespace != "" {
		all = slices.DeleteFunc(all, func(one listed) bool { return one.about.namespace != namespace })
	}
	slices.SortFunc(all, func(a, b listed) int {
		return cmp.Or(cmp.Compare(a.about.namespace, b.about.namespace), cmp.Compare(a.about.name, b.about.name), cmp.Compare(a.connected, b.connected))
	})
	return all
}

// about is what a client says of itself. It never changes.
type about struct {
	id, namespace string
	name          string // of the pod, or of the host of a VM
	software      string
	mergesHosts   bool
}

// about returns what a client says of itself.
func (c *subscriber) about() *about {
	name := strings.Split(c.node, "~")[2] // as parseNode has checked
	return &about{c.node, c.view.Namespace, strings.TrimSuffix(name, "."+c.view.Namespace), c.software, c.mergesHosts}
}

// A record has the times of a session, since the service began; 0 means never. It is guarded by session.mu.
type record struct {
	pushed, acked time.Duration
	nack          nack // the last one
}

// A nack is a push that was rejected, and when.
type nack struct {
	at     time.Duration
	reason string
}

// rejected reports whether the last answer was a NACK.
func (r *record) rejected() bool { return r.nack.at > r.acked }

// answered notes an answer to the last push.
func (r *record) answered(now time.Duration, rejected bool, reason string) {
	if rejected {
		r.nack = nack{now, cut(reason)}
		return
	}
	r.acked = now
}

// state returns the state of the client, which has said about of itself. open is false if the stream has ended.
func (s *session) state(said *about) (a Agent, open bool) {
	select {
	case <-s.ended:
		return a, false
	default:
	}
	a = Agent{
		Replica: s.service.cfg.Replica, Namespace: said.namespace, Name: said.name, ID: said.id, Software: said.software,
		Address: addressOf(s.peer), TLS: s.tls, Variant: s.variant, Mode: modeWhole, State: StateWaiting,
	}
	if said.mergesHosts {
		a.Mode = modeHosts
	}
	now := s.service.tables.now()
	a.ConnectedSeconds, a.Behind = seconds(now-s.connected), now-s.connected >= behindAfter
	t := s.service.tables
	t.mu.Lock()
	joined := s.view != nil
	t.mu.Unlock()
	// Before that, the mutex of the session may be held for long.
	return a, !joined || s.stateOfTable(&a)
}

// stateOfTable sets what is known of the table of a client that has requested it. open is false if the stream has ended.
func (s *session) stateOfTable(a *Agent) (open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.joined {
		return false
	}
	t := s.service.tables
	t.mu.Lock()
	v, woken := s.view, s.woken
	viewer := v.viewer
	a.Digest, a.ServedDigest, a.Hosts = s.accepted, v.version(), v.base.entries+v.entries
	t.mu.Unlock()
	now := t.now()
	a.View, a.Current = describe(&viewer), a.Digest == a.ServedDigest
	a.LastPushSeconds, a.LastAckSeconds = ago(now, s.record.pushed), ago(now, s.record.acked)
	if last := s.record.nack; last.at > 0 {
		a.Nack = &Nack{Reason: last.reason, Seconds: seconds(now - last.at)}
	}
	a.State = s.judgeLocked(now, woken, a.Current)
	a.Behind = a.State == StateUnanswered || a.State == StateRejected || a.State == StateUnsent
	return true
}

// judgeLocked returns the state of a client that has requested its table; current is true if it
// has the current one. woken is when a change came that it was not sent, if there is one.
func (s *session) judgeLocked(now, woken time.Duration, current bool) AgentState {
	r := &s.record
	switch {
	case s.pending && now-r.pushed >= behindAfter:
		return StateUnanswered
	case current:
		return StateCurrent
	case r.rejected():
		return StateRejected
	case s.pending, woken > 0 && now-woken < behindAfter:
		return StateUpdating
	case !s.wanted && !s.client.mergesHosts:
		return StateUnsubscribed
	}
	return StateUnsent
}

func addressOf(a net.Addr) string {
	if a == nil {
		return ""
	}
	return a.String()
}

// seconds returns a time in seconds, with three decimals.
func seconds(d time.Duration) float64 {
	return math.Round(d.Seconds()*1000) / 1000
}

// ago returns how long ago a time was; nil if it was never.
func ago(now, at time.Duration) *float64 {
	if at == 0 {
		return nil
	}
	past := seconds(now - at)
	return &past
}

// describe describes the clients of a viewer.
func describe(k *hosts.Viewer) string {
	parts := []string{"namespace " + k.Namespace}
	if k.Families.V4 {
		parts = append(parts, "IPv4")
	}
	if k.Families.V6 {
		parts = append(parts, "IPv6")
	}
	if k.VIPs {
		parts = append(parts, "automatic VIPs")
	}
	if key := k.Sidecar.Key; key.Name != "" {
		parts = append(parts, fmt.Sprintf("Sidecar %s/%s", key.Namespace, key.Name))
	}
	return strings.Join(parts, ", ")
}
