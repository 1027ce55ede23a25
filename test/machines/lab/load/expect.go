package load

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

// An Expectation says what is asked, and which answers are right.
type Expectation struct {
	Questions []Question `json:"questions"`
	// Foreign are the networks of addresses that only nameservers answer with, where the
	// agent answers. Such an answer, if it is not right, counts as foreign instead of
	// wrong, and so does REFUSED.
	Foreign []netip.Prefix `json:"foreign,omitempty"`

	once  sync.Once
	err   error
	index map[key]*Question
	sums  []int // of the weights, up to and including each question
}

// A Question is a question with its right answer.
type Question struct {
	// Name is the name, with or without a trailing dot. For "*" as its first label, each
	// query has another label instead, so that no cache has the answer.
	Name string `json:"name"`
	// Type is the type, such as "AAAA"; empty means "A".
	Type string `json:"type,omitempty"`
	// Addresses are the addresses that the answer must have, in any order.
	Addresses []netip.Addr `json:"addresses,omitempty"`
	// Rcode is the response code that the answer must have; empty means "NOERROR".
	Rcode string `json:"rcode,omitempty"`
	// Weight is how often the question is asked, relative to other questions; 0 means 1.
	Weight int `json:"weight,omitempty"`
	// Check, unless nil, decides instead of Addresses and Rcode whether an answer is right: it returns nil, or what is
	// wrong with it. It must be safe for concurrent use.
	Check func(Answer) error `json:"-"`

	qtype uint16
	rcode int
}

// An Answer is a response to a query.
type Answer struct {
	Name           string // as asked, with a trailing dot
	Sent, Received time.Time
	Rcode          int
	Addresses      []netip.Addr
}

// key identifies a question of an expectation.
type key struct {
	name  string
	qtype uint16
}

// Addrs parses addresses. It panics if one is malformed.
func Addrs(texts ...string) []netip.Addr {
	addrs := make([]netip.Addr, len(texts))
	for i, text := range texts {
		addrs[i] = netip.MustParseAddr(text)
	}
	return addrs
}

// validate checks the expectation once and prepares it for use.
func (e *Expectation) validate() error {
	e.once.Do(func() { e.err = e.prepare() })
	return e.err
}

func (e *Expectation) prepare() error {
	if len(e.Questions) == 0 {
		return errors.New("the expectation has no questions")
	}
	e.index = make(map[key]*Question, len(e.Questions))
	sum := 0
	for i := range e.Questions {
		q := &e.Questions[i]
		if err := q.prepare(); err != nil {
			return err
		}
		e.index[key{q.Name, q.qtype}] = q
		sum += max(q.Weight, 1)
		e.sums = append(e.sums, sum)
	}
	return nil
}

func (q *Question) prepare() error {
	if _, valid := dns.IsDomainName(q.Name); !valid || q.Name == "" {
		return fmt.Errorf("the name %q of a question is malformed", q.Name)
	}
	q.Name = dns.CanonicalName(q.Name)
	q.qtype = dns.TypeA
	if q.Type != "" {
		var known bool
		if q.qtype, known = dns.StringToType[q.Type]; !known {
			return fmt.Errorf("the type %q of the question %s is unknown", q.Type, q.Name)
		}
	}
	if q.Rcode != "" {
		var known bool
		if q.rcode, known = dns.StringToRcode[q.Rcode]; !known {
			return fmt.Errorf("the response code %q of the question %s is unknown", q.Rcode, q.Name)
		}
	}
	slices.SortFunc(q.Addresses, netip.Addr.Compare)
	return nil
}

var errUnexpected = errors.New("unexpected")

// check returns nil for a right answer.
func (q *Question) check(a Answer) error {
	if q.Check != nil {
		return q.Check(a)
	}
	if a.Rcode != q.rcode || !slices.Equal(slices.SortedFunc(slices.Values(a.Addresses), netip.Addr.Compare), q.Addresses) {
		return errUnexpected
	}
	return nil
}

// foreign reports whether only another server than the agent gives such an answer.
func (e *Expectation) foreign(a Answer) bool {
	return a.Rcode == dns.RcodeRefused || slices.ContainsFunc(a.Addresses, func(addr netip.Addr) bool {
		return slices.ContainsFunc(e.Foreign, func(p netip.Prefix) bool { return p.Contains(addr) })
	})
}

// pick returns the question for a random number of at least 0.
func (e *Expectation) pick(random int) *Question {
	random %= e.sums[len(e.sums)-1]
	at, _ := slices.BinarySearch(e.sums, random+1)
	return &e.Questions[at]
}

// ask returns the name to ask, with a trailing dot. unique distinguishes queries.
func (q *Question) ask(unique uint64) string {
	if rest, star := strings.CutPrefix(q.Name, "*."); star {
		return fmt.Sprintf("q%x.%s", unique, rest)
	}
	return q.Name
}

// A window is a time with expectations: until the next window begins.
type window struct {
	from         time.Time
	expectations []*Expectation
}

// current returns the expectation with the questions to ask.
func (l *Load) current() *Expectation {
	l.mu.Lock()
	defer l.mu.Unlock()
	expectations := l.windows[len(l.windows)-1].expectations
	return expectations[len(expectations)-1]
}

// verdict returns the kind of an answer to a question, and what is wrong with it: Right and nil if an expectation that was
// valid at some time between the query and the answer says so.
func (l *Load) verdict(q *Question, a Answer) (Kind, error) {
	l.mu.Lock()
	list := l.windows
	l.mu.Unlock()
	kind, wrong := Wrong, errUnexpected
	for i, window := range list {
		if window.from.After(a.Received) || i+1 < len(list) && list[i+1].from.Before(a.Sent) {
			continue
		}
		for _, e := range window.expectations {
			if same := e.index[key{q.Name, q.qtype}]; same != nil {
				if wrong = same.check(a); wrong == nil {
					return Right, nil
				}
			}
			if e.foreign(a) {
				kind = Foreign
			}
		}
	}
	if kind == Wrong && a.Rcode == dns.RcodeServerFailure {
		kind = Failed
	}
	return kind, wrong
}
