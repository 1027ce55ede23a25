package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// takeEffect is how long a change may take to be in use: 1 s (R10, F5), and half as much again, since this test and the
// agent share the processors.
const takeEffect = 1500 * time.Millisecond

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

// begin notes that the value is about to change.
func (h *history[T]) begin(value T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.values = append(h.values, dated[T]{value: value, begun: time.Now()})
}

// end notes that it has changed.
func (h *history[T]) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.values[len(h.values)-1].done = time.Now()
}

// during returns the values that may have been in use at some time between sent and received, each once. A
// replaced value may stay in use for as long as slack.
func (h *history[T]) during(sent, received time.Time, slack time.Duration) []T {
	h.mu.Lock()
	defer h.mu.Unlock()
	var found []T
	for _, v := range slices.Backward(h.values) {
		if v.begun.After(received) {
			continue
		}
		if !slices.Contains(found, v.value) {
			found = append(found, v.value)
		}
		if !v.done.IsZero() && v.done.Add(slack).Before(sent) {
			break
		}
	}
	return found
}

// last returns the current value.
func (h *history[T]) last() T {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.values[len(h.values)-1].value
}

// Stalls are times in which this process, or the agent, was ready to run and did not get a processor.
type stalls struct {
	mu   sync.Mutex
	list []stall
}

type stall struct {
	until time.Time
	took  time.Duration
}

// run notes stalls until done is closed.
func (s *stalls) run(agent int, done <-chan struct{}) {
	const interval, longest = 20 * time.Millisecond, 100 * time.Millisecond
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last, looked, waited := time.Now(), time.Now(), waitedFor(agent)
	note := func(took time.Duration) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.list = append(s.list, stall{time.Now(), took})
	}
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
		}
		now := time.Now()
		if took := now.Sub(last); took > longest {
			note(took)
		}
		last = now
		if took := now.Sub(looked); took > longest {
			total := waitedFor(agent)
			if total-waited > took/2 {
				note(took)
			}
			looked, waited = now, total
		}
	}
}

// waitedFor returns how long the threads of a process have waited for a processor, all together (proc(5)).
func waitedFor(pid int) (total time.Duration) {
	paths, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // the pattern is good
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // the thread has ended
		}
		if fields := strings.Fields(string(text)); len(fields) > 1 {
			nanoseconds, _ := strconv.ParseInt(fields[1], 10, 64)
			total += time.Duration(nanoseconds)
		}
	}
	return total
}

// between returns how long the stalls of a time took.
func (s *stalls) between(from, until time.Time) (took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, stall := range slices.Backward(s.list) {
		if stall.until.Before(from) {
			break
		}
		if stall.until.Add(-stall.took).Before(until) {
			took += stall.took
		}
	}
	return took
}

// A judge knows what was in use when, and so which responses are right.
type judge struct {
	resolvConf, upstream          history[int] // groups; -1 for none
	route, bypass, local          history[bool]
	cacheOff                      history[bool]
	ttl                           history[uint32]
	generation                    history[int]
	groups                        []*serverGroup
	stalls                        stalls
	calm                          bool // nothing fails any more, and answers to queries with DO are signed
	mu                            sync.Mutex
	slowest, slowestMesh          time.Duration
	failures, truncated, unsigned int // answers that are right only because of faults
	answers, mesh                 int
}

// Limits of times.
const (
	forwardLimit = 4200 * time.Millisecond
	meshLimit    = time.Second
	failuresStay = 5 * time.Second         // after an outage (F8)
	backAfter    = 1500 * time.Millisecond // a nameserver that lives again is found by a probe, and may be late by a second
)

// moment is the time of a query, with what may have been in use meanwhile.
type moment struct {
	sent, received time.Time
	slack          time.Duration
}

// judge returns an error if a response is not right.
func (j *judge) judge(q *question, m *dns.Msg, length int, received time.Time) error {
	stalled := j.stalls.between(q.sent.Add(-takeEffect), received)
	at := moment{q.sent, received, takeEffect + stalled}
	if err := checkHeader(q, m, length); err != nil {
		return err
	}
	mesh, right := j.right(q, m, at)
	took, limit := received.Sub(q.sent), forwardLimit
	if mesh {
		limit = meshLimit
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.answers++
	if mesh {
		j.mesh++
		j.slowestMesh = max(j.slowestMesh, took)
	} else {
		j.slowest = max(j.slowest, took)
	}
	if right == nil && took > limit+stalled {
		return fmt.Errorf("it took %v", took)
	}
	return right
}

// checkHeader checks what does not depend on the name.
func checkHeader(q *question, m *dns.Msg, length int) error {
	opt := m.IsEdns0()
	switch {
	case !m.Response || m.Opcode != dns.OpcodeQuery || len(m.Question) != 1:
		return errors.New("no response to a question")
	case m.Question[0] != dns.Question{Name: q.name, Qtype: q.qtype, Qclass: dns.ClassINET}:
		return fmt.Errorf("question %v", m.Question[0])
	case m.RecursionDesired != q.recursive, m.CheckingDisabled != q.cd:
		return errors.New("flags of another query")
	case !q.recursive && (m.Truncated && opt == nil || m.Rcode != dns.RcodeSuccess): // relayed as it is: a part, or a failure without EDNS
	case (opt != nil) != (q.edns > 0):
		return fmt.Errorf("OPT record: %v", opt)
	case opt != nil && opt.Do() != q.do:
		return errors.New("another DO")
	case length > q.limit():
		return fmt.Errorf("%d bytes", length)
	}
	return nil
}

// right returns an error unless the records are right for the name at that time. It reports whether the name must
// be answered from the table.
func (j *judge) right(q *question, m *dns.Msg, at moment) (mesh bool, err error) {
	name := strings.ToLower(q.name)
	var errs []error
	forward := func(groups []int) error {
		for _, group := range groups {
			err := j.forwardRight(q, m, at, group)
			if err == nil {
				return nil
			}
			errs = append(errs, fmt.Errorf("of group %d: %w", group, err))
		}
		return errors.Join(errs...)
	}
	fromTable := func(host int, kubernetes bool) (absent bool, err error) {
		for _, generation := range j.generation.during(at.sent, at.received, at.slack) {
			if !kubernetes || inTable(host, generation) {
				err := j.meshRight(q, m, at, meshAddress(host, generation))
				if err == nil {
					return false, nil
				}
				errs = append(errs, fmt.Errorf("of generation %d: %w", generation, err))
			} else {
				absent = true
			}
		}
		return absent, errors.Join(errs...)
	}
	main := j.mains(at)
	if host := hostOf(name); host >= 0 {
		absent, err := fromTable(host, true)
		if err != nil && absent {
			return false, forward(main)
		}
		return host < meshHosts, err
	}
	switch {
	case strings.HasSuffix(name, ".byp.example."):
		bypass := j.bypass.during(at.sent, at.received, at.slack)
		if q.qtype != dns.TypeTXT && slices.Contains(bypass, false) { // other types are forwarded in any case (A4)
			host := 0
			_, _ = fmt.Sscanf(name, "x%d.", &host) // it is one
			if _, err := fromTable(host, false); err == nil || !slices.Contains(bypass, true) {
				return true, err
			}
		}
		return false, forward(main)
	case strings.HasSuffix(name, ".loc.example."):
		local := j.local.during(at.sent, at.received, at.slack)
		if slices.Contains(local, true) {
			if m.Rcode == dns.RcodeNameError && len(m.Answer) == 0 && len(m.Ns) == 1 && strings.EqualFold(m.Ns[0].Header().Name, "loc.example.") {
				return !slices.Contains(local, false), nil
			}
			if !slices.Contains(local, false) {
				return true, errors.New("want NXDOMAIN of the local-only suffix")
			}
		}
		return false, forward(main)
	case strings.HasSuffix(name, ".route.example."):
		var groups []int
		for _, routed := range j.route.during(at.sent, at.received, at.slack) {
			if routed {
				groups = append(groups, routeGroup)
			} else {
				groups = append(groups, main...)
			}
		}
		return false, forward(groups)
	}
	return false, forward(main)
}

// mains returns the groups that all names may have been forwarded to that have no others.
func (j *judge) mains(at moment) (groups []int) {
	for _, group := range j.upstream.during(at.sent, at.received, at.slack) {
		if group >= 0 {
			groups = append(groups, group)
		} else {
			groups = append(groups, j.resolvConf.during(at.sent, at.received, at.slack)...)
		}
	}
	return groups
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
			if i > 0 || !strings.HasSuffix(strings.ToLower(q.name), searched) {
				return errors.New("want no CNAME")
			}
		case *dns.A:
			if rr.A.String() != address {
				return fmt.Errorf("want %s", address)
			}
		}
		if !slices.Contains(j.ttl.during(at.sent, at.received, at.slack), rr.Header().Ttl) {
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
	// Without a cache, and without RD, nameservers are asked over the client's protocol, and a truncated reply is its
	// answer.
	asClient := !q.recursive || slices.Contains(j.cacheOff.during(at.sent, at.received, at.slack), true)
	from := at.sent.Add(-backAfter) // since when a nameserver was to live
	if q.again && q.recursive {
		from = from.Add(-failuresStay)
	}
	if m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError {
		if want.Rcode == dns.RcodeServerFailure {
			return nil
		}
		_, failing := failingServer(name, len(g.servers))
		needs := need{except: failing, tcp: q.tcp && asClient, edns: !q.recursive && q.edns > 0}
		if g.oneAnswers(from, at.received, needs) {
			return fmt.Errorf("%s, although a nameserver lives", dns.RcodeToString[m.Rcode])
		}
		j.count(&j.failures)
		return nil
	}
	if name[0] == 'x' || name[0] == 'h' {
		// The host of a table exists, so that a negative answer of nameservers is NODATA (A4).
		want.Rcode = min(want.Rcode, m.Rcode)
	}
	if m.Truncated {
		_, failing := failingServer(name, len(g.servers))
		long := !q.tcp && (name[0] == 'b' || name[0] == 't' && asClient)
		// The retry over TCP has 1 s (F2), for a part of which the processors may have been busy.
		late := at.slack > takeEffect && at.received.Sub(at.sent) >= time.Second
		if !long && (name[0] != 't' && name[0] != 'b' || !late && g.oneAnswers(from, at.received, need{except: failing, tcp: true})) {
			return errors.New("truncated")
		}
		if !long {
			j.count(&j.truncated)
		}
	}
	if m.Rcode != want.Rcode {
		return fmt.Errorf("%s", dns.RcodeToString[m.Rcode])
	}
	answer := sameRecords(m.Answer, want.Answer, m.Truncated)
	if answer != nil && q.do && (!j.calm || g.wasPlain.Load()) {
		plain := *q
		plain.do = false
		if want := replyOf(plain.message(), group); sameRecords(m.Answer, want.Answer, m.Truncated) == nil {
			answer = nil
			j.count(&j.unsigned)
		}
	}
	if answer != nil {
		return answer
	}
	return sameRecords(m.Ns, want.Ns, m.Truncated)
}

func (j *judge) count(n *int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	*n++
}
