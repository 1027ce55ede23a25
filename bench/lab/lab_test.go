package lab

import (
	"testing"
	"time"

	"github.com/miekg/dns"
)

func TestQuantile(t *testing.T) {
	sorted := []time.Duration{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 6, 0.99: 10, 1: 10} {
		if got := Quantile(sorted, q); got != want {
			t.Errorf("%v: %v, want %v", q, got, want)
		}
	}
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("of nothing: %v", got)
	}
}

// What is no answer to a query is not counted as one.
func TestLooksRight(t *testing.T) {
	query := new(dns.Msg).SetQuestion("www.", dns.TypeA)
	message := func(m *dns.Msg) []byte {
		wire, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return wire
	}
	other := new(dns.Msg).SetReply(query)
	other.Id++
	for what, reply := range map[string][]byte{
		"no records": message(new(dns.Msg).SetReply(query)), "other ID": message(other), "a query": message(query), "nothing": nil,
	} {
		if looksRight(message(query), reply) == nil {
			t.Errorf("%s is taken for an answer", what)
		}
	}
}
