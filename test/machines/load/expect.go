package load

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
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
	// Any makes an answer right if it has one or more of the addresses, and no other.
	Any bool `json:"any,omitempty"`
	// Rcode is the response code that the answer must have; empty means "NOERROR".
	Rcode string `json:"rcode,omitempty"`
	// MayFail makes SERVFAIL right, too.
	MayFail bool `json:"may_fail,omitempty"`
	// Weight is how often the question is asked, relative to other questions; 0 means 1.
	Weight int `json:"weight,omitempty"`
	// Check, unless nil, decides instead of Addresses, Any, Rcode and MayFail whether an
	// answer is right: it returns nil, or what is wrong with it. It must be safe for
	// concurrent use.
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

// ReadExpectation reads an expectation from a JSON file.
func ReadExpectation(path string) (*Expectation, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // it was only read
	decoder := json.NewDecoder(file)
	decoder.DisallowUnknownFields()
	e := new(Expectation)
	if err := decoder.Decode(e); err != nil {
		return nil, fmt.Errorf("reading the expectation %s: %w", path, err)
	}
	return e, e.validate()
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

// errUnexpected is the error of an answer whose detail says enough.
var errUnexpected = errors.New("unexpected")

// check returns nil for a right answer.
func (q *Question) check(a Answer) error {
	right := false
	switch {
	case q.Check != nil:
		return q.Check(a)
	case q.MayFail && a.Rcode == dns.RcodeServerFailure:
		right = true
	case a.Rcode != q.rcode:
	case q.Any:
		right = len(a.Addresses) > 0 && !slices.ContainsFunc(a.Addresses, func(addr netip.Addr) bool { return !slices.Contains(q.Addresses, addr) })
	default:
		right = slices.Equal(slices.SortedFunc(slices.Values(a.Addresses), netip.Addr.Compare), q.Addresses)
	}
	if !right {
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

// windows are the expectations by time. All methods are safe for concurrent use.
type windows struct {
	mu   sync.RWMutex
	list []window // ordered by time; the last one is current
}

// A window is a time with expectations: until the next window begins.
type window struct {
	from         time.Time
	expectations []*Expectation
}

// set begins a window, and drops windows that no query in flight can need.
func (w *windows) set(now time.Time, timeout time.Duration, expectations []*Expectation) {
	w.mu.Lock()
	defer w.mu.Unlock()
	oldest := now.Add(-2 * timeout) // longer than any query
	first := 0
	for first+1 < len(w.list) && w.list[first+1].from.Before(oldest) {
		first++
	}
	w.list = append(slices.Clone(w.list[min(first, len(w.list)):]), window{now, expectations})
}

// current returns the expectation with the questions to ask.
func (w *windows) current() *Expectation {
	w.mu.RLock()
	defer w.mu.RUnlock()
	expectations := w.list[len(w.list)-1].expectations
	return expectations[len(expectations)-1]
}

// judge returns the kind of an answer to a question, and what is wrong with it: Right and nil
// if an expectation that was valid at some time between the query and the answer says so.
func (w *windows) judge(q *Question, a Answer) (Kind, error) {
	w.mu.RLock()
	list := w.list
	w.mu.RUnlock()
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
