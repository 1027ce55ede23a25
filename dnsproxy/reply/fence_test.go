package reply

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// TestFence checks that a response for a client with little room costs about the same whatever a nameserver
// has put into the reply: 20 or 2,000 records, with names of many labels.
func TestFence(t *testing.T) { // A14
	// Not parallel: it compares processor times.
	name := strings.Repeat("a.", 100) + "example.org."
	sections := map[string]func(*dns.Msg) *[]dns.RR{
		"answer":     func(m *dns.Msg) *[]dns.RR { return &m.Answer },
		"authority":  func(m *dns.Msg) *[]dns.RR { return &m.Ns },
		"additional": func(m *dns.Msg) *[]dns.RR { return &m.Extra },
	}
	for section, of := range sections {
		for owners, prefix := range map[string]string{"one owner": "n", "many owners": "n%d"} {
			t.Run(section+", "+owners, func(t *testing.T) {
				small, large := cost(t, prefix+"."+name, 20, of), cost(t, prefix+"."+name, 2_000, of)
				t.Logf("20 records: %v, 2,000: %v", small, large)
				if large > 3*small && large > 20*time.Microsecond {
					t.Errorf("2,000 records cost %v, and 20 cost %v", large, small)
				}
			})
		}
	}
}

// cost returns the shortest of several times for a response of 512 bytes with a reply whose section has n
// records. In their names, %d of owners is a number.
func cost(t *testing.T, owners string, n int, section func(*dns.Msg) *[]dns.RR) time.Duration {
	t.Helper()
	query := new(dns.Msg).SetQuestion("example.org.", dns.TypeMX)
	msg := new(dns.Msg).SetReply(query)
	msg.Compress = true
	for i := range n {
		rr, err := dns.NewRR(strings.Replace(owners, "%d", strconv.Itoa(i), 1) + " 60 IN A 192.0.2.1")
		if err != nil {
			t.Fatal(err)
		}
		*section(msg) = append(*section(msg), rr)
	}
	packed, err := msg.Pack()
	if err != nil {
		t.Fatal(err)
	}
	r, err := Parse(packed)
	if err != nil {
		t.Fatal(err)
	}
	sent, err := query.Pack()
	if err != nil {
		t.Fatal(err)
	}
	const batches, responses = 50, 100
	buf, best := make([]byte, 0, 512), time.Hour
	for range batches {
		start := time.Now()
		for range responses {
			r.Append(buf, &Request{Query: sent, Limit: 512}, Age{Cached: true, Seconds: 1})
		}
		best = min(best, time.Since(start)/responses)
	}
	return best
}
