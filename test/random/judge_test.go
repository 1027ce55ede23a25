package random

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// takeEffect is how long a change may take to be in use: 2 s (R10; F5 says 1 s), and a quarter as much again, since this test
// and the agent share the processors.
const takeEffect = 2500 * time.Millisecond

// A history is the values that a setting has had. Its methods are safe for concurrent use.
type history[T comparable] struct {
	mu     sync.Mutex
	values []dated[T]
}

// A dated value was being set from begun to done; done is zero meanwhile.
type dated[T comparable] struct {
	value       T
	begun, done time.Time
}

// set notes that a function sets the value.
func (h *history[T]) set(value T, apply func()) {
	h.mu.Lock()
	h.values = append(h.values, dated[T]{value: value, begun: time.Now()})
	last := len(h.values) - 1
	h.mu.Unlock()
	apply()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.values[last].done = time.Now()
}

// during returns the values that may have been in use at some time of a moment.
func (h *history[T]) during(at moment) (found []T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, v := range slices.Backward(h.values) {
		if v.begun.After(at.received) {
			continue
		}
		found = append(found, v.value)
		if !v.done.IsZero() && v.done.Add(at.slack).Before(at.sent) {
			break
		}
	}
	return found
}

// A judge knows what was in use when, and so which responses are right.
type judge struct {
	settings   history[knobs]
	resolvConf history[int] // groups
	generation history[int]
	groups     []*serverGroup
	stalls     stalls

	mu      sync.Mutex
	calm    bool // nothing fails any more, and answers to queries with DO are signed
	answers int
}

// Limits of times.
const (
	forwardLimit = 4200 * time.Millisecond
	meshLimit    = time.Second
	failuresStay = 5 * time.Second         // after an outage (F8)
	backAfter    = 1500 * time.Millisecond // a nameserver that lives again is found by a probe, and may be late by a second
)

// moment is the time of a query, and for how long before it a replaced value may have stayed in use.
type moment struct {
	sent, received time.Time
	slack          time.Duration
}

// judge returns an error if a response is not right, and since when what happened may be its cause.
func (j *judge) judge(q *question, m *dns.Msg, received time.Time) (since time.Time, err error) {
	since = q.sent.Add(-takeEffect)
	if m.Truncated || m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		since = q.sent.Add(-backAfter - failuresStay)
	}
	mesh, err := j.right(q, m, moment{q.sent, received, takeEffect})
	took := received.Sub(q.sent)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.answers++
	limit := forwardLimit
	if mesh {
		limit = meshLimit
	}
	if err == nil && took > limit {
		err = fmt.Errorf("it took %v", took)
	}
	return since, err
}

// staysWrong reports whether a finding is wrong although the machine stood still for a while, in which settings took longer
// to be in use. Nothing can be said about failures and times.
func (j *judge) staysWrong(f *finding, stalled time.Duration) bool {
	if f.m == nil || f.m.Truncated || f.m.Rcode != dns.RcodeSuccess && f.m.Rcode != dns.RcodeNameError {
		return false
	}
	_, err := j.right(f.q, f.m, moment{f.q.sent, f.until, takeEffect + 2*stalled})
	return err != nil
}

// checkHeader checks what does not depend on the name.
func checkHeader(q *question, m *dns.Msg, length int) error {
	opt, limit := m.IsEdns0(), dns.MaxMsgSize
	if !q.tcp {
		limit = max(int(q.edns), dns.MinMsgSize)
	}
	switch {
	case !m.Response || m.Opcode != dns.OpcodeQuery || len(m.Question) != 1:
		return errors.New("no response to a question")
	case m.Question[0] != dns.Question{Name: q.name, Qtype: q.qtype, Qclass: dns.ClassINET}:
		return fmt.Errorf("question %v", m.Question[0])
	case !m.RecursionDesired, m.CheckingDisabled != q.cd:
		return errors.New("flags of another query")
	case (opt != nil) != (q.edns > 0):
		return fmt.Errorf("OPT record: %v", opt)
	case opt != nil && opt.Do() != q.do:
		return errors.New("another DO")
	case length > limit:
		return fmt.Errorf("%d bytes", length)
	}
	return nil
}

// right returns an error unless the records are right for the name at that time. It reports whether the name must
// be answered from the table.
func (j *judge) right(q *question, m *dns.Msg, at moment) (mesh bool, err error) {
	forward := func(groups []int) error {
		var errs []error
		for _, group := range groups {
			err := j.forwardRight(q, m, at, group)
			if err == nil {
				return nil
			}
			errs = append(errs, fmt.Errorf("of group %d: %w", group, err))
		}
		return errors.Join(errs...)
	}
	var main, routes []int // groups
	for _, k := range j.settings.during(at) {
		groups := []int{k.upstream}
		if k.upstream == neverFrom {
			groups = j.resolvConf.during(at)
		}
		main = append(main, groups...)
		if k.route {
			groups = []int{routeGroup}
		}
		routes = append(routes, groups...)
	}
	switch {
	case q.host >= 0:
		mesh = q.host < meshHosts && !strings.HasSuffix(strings.ToLower(q.name), searched) // after nameservers (N5)
		var errs []error
		for _, generation := range j.generation.during(at) {
			if inTable(q.host, generation) {
				err = j.meshRight(q, m, at, meshAddress(q.host, generation))
			} else {
				err = forward(main)
			}
			if err == nil {
				return mesh, nil
			}
			errs = append(errs, fmt.Errorf("of generation %d: %w", generation, err))
		}
		return mesh, errors.Join(errs...)
	case strings.HasSuffix(strings.ToLower(q.name), routed):
		return false, forward(routes)
	}
	return false, forward(main)
}

// meshRight returns an error unless a response is that of the table for a host with an address.
func (j *judge) meshRight(q *question, m *dns.Msg, at moment, address string) error {
	if m.Rcode != dns.RcodeSuccess {
		return fmt.Errorf("%s", dns.RcodeToString[m.Rcode])
	}
	if q.qtype != dns.TypeA {
		if len(m.Answer) > 0 || len(m.Ns) != 1 {
			return errors.New("want NODATA")
		}
		return nil
	}
	if m.Truncated || len(m.Answer) == 0 {
		return errors.New("want an address")
	}
	for i, rr := range m.Answer {
		switch rr := rr.(type) {
		case *dns.CNAME:
			if i > 0 || strings.HasSuffix(strings.ToLower(q.name), meshDomain) { // neither short nor below the search list
				return errors.New("want no CNAME")
			}
		case *dns.A:
			if rr.A.String() != address {
				return fmt.Errorf("want %s", address)
			}
		}
		if !slices.ContainsFunc(j.settings.during(at), func(k knobs) bool { return k.ttl == rr.Header().Ttl }) {
			return errors.New("another TTL")
		}
	}
	return nil
}

// forwardRight returns an error unless a response is that of a group of nameservers at that time.
func (j *judge) forwardRight(q *question, m *dns.Msg, at moment, group int) error {
	name := strings.ToLower(q.name)
	want := replyOf(q.message(), group)
	g := j.groups[group]
	// Without a cache, nameservers are asked over the client's protocol, and a truncated reply is its answer.
	asClient := slices.ContainsFunc(j.settings.during(at), func(k knobs) bool { return k.cacheOff })
	from := at.sent.Add(-backAfter) // since when a nameserver was to live
	if q.again {
		from = from.Add(-failuresStay)
	}
	if m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		if want.Rcode == dns.RcodeServerFailure {
			return nil
		}
		if g.oneAnswers(from, at.received, q.tcp && asClient) {
			return fmt.Errorf("%s, although a nameserver lives", dns.RcodeToString[m.Rcode])
		}
		return nil
	}
	if name[0] == 'h' {
		// The host of a table exists, so that a negative answer of nameservers is NODATA (A4).
		want.Rcode = min(want.Rcode, m.Rcode)
	}
	if m.Truncated && (q.tcp || name[0] != 'b') {
		if name[0] != 'b' || g.oneAnswers(from, at.received, true) {
			return errors.New("truncated")
		}
	}
	if m.Rcode != want.Rcode {
		return fmt.Errorf("%s", dns.RcodeToString[m.Rcode])
	}
	answer := sameRecords(m.Answer, want.Answer, m.Truncated)
	if answer != nil && q.do && !j.calm {
		plain := *q
		plain.do = false
		if want := replyOf(plain.message(), group); sameRecords(m.Answer, want.Answer, m.Truncated) == nil {
			answer = nil
		}
	}
	if answer != nil {
		return answer
	}
	return sameRecords(m.Ns, want.Ns, m.Truncated)
}
