package reply

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/miekg/dns"
)

// TestFence checks that a response for a client with little room reads only the records that fit, and the first that
// does not, however many a nameserver has put into the reply: reading one of the others panics here. A14.
func TestFence(t *testing.T) {
	t.Parallel()
	query := new(dns.Msg).SetQuestion("example.org.", dns.TypeMX)
	sent, err := query.Pack()
	if err != nil {
		t.Fatal(err)
	}
	for section, of := range map[string]func(*dns.Msg) *[]dns.RR{
		"answer":     func(m *dns.Msg) *[]dns.RR { return &m.Answer },
		"authority":  func(m *dns.Msg) *[]dns.RR { return &m.Ns },
		"additional": func(m *dns.Msg) *[]dns.RR { return &m.Extra },
	} {
		msg := new(dns.Msg).SetReply(query)
		msg.Compress = true
		for i := range 2_000 {
			rr, err := dns.NewRR(fmt.Sprintf("n%d.%sexample.org. 60 IN A 192.0.2.1", i, strings.Repeat("a.", 100)))
			if err != nil {
				t.Fatal(err)
			}
			*of(msg) = append(*of(msg), rr)
		}
		packed, err := msg.Pack()
		if err != nil {
			t.Fatal(err)
		}
		r, err := Parse(packed)
		if err != nil {
			t.Fatal(err)
		}
		const fit = 512 / 16 // at most
		for i := fit + 1; i < len(r.records); i++ {
			r.records[i].fixed = math.MaxUint16
		}
		response, _, _ := r.Append(sent, Place{Owner: 12, Limit: 512}, r.Records(), Age{Seconds: 1})
		if len(response) > 512 || section != "additional" && len(response) < 480 {
			t.Errorf("%s: a response of %d bytes", section, len(response))
		}
	}
}
