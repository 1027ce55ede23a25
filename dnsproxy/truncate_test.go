package dnsproxy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
)

// Every order of the addresses of a host, and every selection if they do not all fit, is equally likely.
func TestTruncatedSample(t *testing.T) { // A7, A9
	t.Parallel()
	label := strings.Repeat("l", 63)
	// Question and CNAME leave 59 of 512 bytes, room for three IPv4 or two IPv6 addresses.
	target := label + "." + label + "." + label[:40]
	search := label + "." + label[:20]
	cfg := Config{TTL: time.Second, EDNSUDPSize: 1232, Domain: search}
	w := newWorld(t, cfg, []string{search})
	host := &api.NameTable_NameInfo{}
	for i := range 6 {
		host.Ips = append(host.Ips, fmt.Sprintf("192.0.2.%d", i), fmt.Sprintf("2001:db8::%d", i))
	}
	w.loadServer(t, map[string]*api.NameTable_NameInfo{target: host, "few.example": {Ips: host.Ips[:8]}})
	for _, c := range []struct {
		name     string
		qtype    uint16
		outcomes int
		// A chi-square with one degree of freedom less than there are outcomes exceeds
		// bound with p < 1e-6.
		bound float64
	}{
		{target + "." + search, dns.TypeA, 6 * 5 * 4, 212},
		{target + "." + search, dns.TypeAAAA, 6 * 5, 87},
		{target + "." + search, dns.TypeANY, 6 * 5 * 4, 212}, // IPv4 first, which leaves no room
		{"few.example", dns.TypeA, 4 * 3 * 2, 75},            // all fit
	} {
		packet, err := new(dns.Msg).SetQuestion(c.name+".", c.qtype).Pack()
		if err != nil {
			t.Fatal(err)
		}
		const each = 200 // answers, on average, for every outcome
		seen := map[string]int{}
		for range each * c.outcomes {
			w.task.begin(packet, &arrival{protocol: overUDP, client: noClient})
			out, _ := w.server.handler.answerFast(nil, w.task)
			seen[string(out)]++
		}
		chi := float64(c.outcomes-len(seen)) * each
		for _, n := range seen {
			chi += float64((n-each)*(n-each)) / each
		}
		if len(seen) > c.outcomes || chi > c.bound {
			t.Errorf("%s: %d outcomes, chi-square %.1f; want %d and at most %.0f",
				dns.TypeToString[c.qtype], len(seen), chi, c.outcomes, c.bound)
		}
	}
}
