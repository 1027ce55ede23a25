package load

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/miekg/dns"
)

// An Expectation says what is asked, and which answers are right.
type Expectation struct {
	Questions []Question `json:"questions"`
	// Foreign are the networks of addresses that only nameservers answer with, where the
	// agent answers. Such an answer, if it is not right, counts as foreign instead of
	// wrong, and so does REFUSED.
	Foreign []netip.Prefix `json:"foreign,omitempty"`

	once sync.Once
	err  error
	sums []int // of the weights, up to and including each question
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

	qtype uint16
	rcode int
}

// An answer is a response to a query.
type answer struct {
	rcode     int
	addresses []netip.Addr
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
	sum := 0
	for i := range e.Questions {
		q := &e.Questions[i]
		if err := q.prepare(); err != nil {
			return err
		}
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

// right reports whether an answer is right.
func (q *Question) right(a answer) bool {
	return a.rcode == q.rcode && slices.Equal(slices.SortedFunc(slices.Values(a.addresses), netip.Addr.Compare), q.Addresses)
}

// foreign reports whether only another server than the agent gives such an answer.
func (e *Expectation) foreign(a answer) bool {
	return a.rcode == dns.RcodeRefused || slices.ContainsFunc(a.addresses, func(addr netip.Addr) bool {
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

// verdict returns the kind of an answer to a question.
func (e *Expectation) verdict(q *Question, a answer) Kind {
	switch {
	case q.right(a):
		return Right
	case e.foreign(a):
		return Foreign
	case a.rcode == dns.RcodeServerFailure:
		return Failed
	}
	return Wrong
}
