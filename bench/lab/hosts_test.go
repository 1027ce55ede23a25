package lab

import (
	"net/netip"
	"testing"

	"github.com/miekg/dns"
)

// reply makes a response of records.
func reply(t *testing.T, records ...string) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	for _, text := range records {
		record, err := dns.NewRR(text)
		if err != nil {
			t.Fatal(err)
		}
		m.Answer = append(m.Answer, record)
	}
	return m
}

func TestChecks(t *testing.T) {
	h := Host{Name: "a.example", ips: []netip.Addr{Address(10, 1), Address(10, 2)}}
	both := []string{"x. A 10.0.0.2", "x. A 10.0.0.1"}
	alias := append([]string{"x. CNAME A.example."}, both...)
	byName := map[string]Mix{}
	for _, m := range Mixes() {
		byName[m.Name] = m
	}
	for _, c := range []struct {
		mix     string
		records []string
		ok      bool
	}{
		{"direct", both, true},
		{"direct", both[:1], false},
		{"direct", append(both, "x. A 10.0.0.3"), false},
		{"direct", nil, false},
		{"autopath", alias, true},
		{"autopath", both, false},
		{"autopath", []string{"x. CNAME b.example.", both[0], both[1]}, false},
		{"autopath", alias[:1], false},
		{"nodata", nil, true},
		{"nodata", both, false},
		{"ptr", []string{"x. PTR a.example."}, true},
		{"ptr", []string{"x. PTR b.example."}, false},
		{"ptr", nil, false},
	} {
		if err := byName[c.mix].check(h, reply(t, c.records...)); (err == nil) != c.ok {
			t.Errorf("%s %q: %v", c.mix, c.records, err)
		}
	}
}
