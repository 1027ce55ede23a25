package lab

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"strings"

	"github.com/miekg/dns"
)

// ReplayDomain is the zone whose names are replayed.
const ReplayDomain = "replay.example."

// replayNames is the number of names in the zone.
const replayNames = 20_000

// TTLs of the zone, in seconds: short ones as often as long ones, on a logarithmic
// scale.
const (
	shortestTTL = 5
	longestTTL  = 300
)

// A Zone is generated from a seed: hosts, aliases of up to three links, mail
// domains, services and texts.
type Zone struct {
	random *rand.Rand
	Text   strings.Builder
	// questions are the questions for each name, the usual one first.
	questions [][]dns.Question
}

// MakeZone makes the zone of the replay. It is the same each time.
func MakeZone() *Zone {
	z := &Zone{random: rand.New(rand.NewPCG(3, 5))}
	fmt.Fprintf(&z.Text, "$ORIGIN %s\n@ 300 SOA ns hostmaster 1 3600 600 86400 30\n@ 300 NS ns\nns 300 A 127.0.0.4\n", ReplayDomain)
	for i := range replayNames {
		switch share := z.random.IntN(100); {
		case share < 55:
			z.host(i)
		case share < 70:
			z.alias(i)
		case share < 80:
			z.mail(i)
		case share < 90:
			z.service(i)
		default:
			z.texts(i)
		}
	}
	return z
}

// hostOf returns the host name of i.
func hostOf(i int) string { return fmt.Sprintf("h%05d", i) }

// record adds a record. Names in data without a trailing dot are in the zone.
func (z *Zone) record(name, format string, args ...any) {
	ttl := int(shortestTTL * math.Pow(longestTTL/shortestTTL, z.random.Float64()))
	fmt.Fprintf(&z.Text, "%s %d %s\n", name, ttl, fmt.Sprintf(format, args...))
}

// set adds n records of a set with the same TTL.
func (z *Zone) set(name string, n int, data func(k int) string) {
	ttl := int(shortestTTL * math.Pow(longestTTL/shortestTTL, z.random.Float64()))
	for k := range n {
		fmt.Fprintf(&z.Text, "%s %d %s\n", name, ttl, data(k))
	}
}

// ask adds a question for a name.
func (z *Zone) ask(name string, qtypes ...uint16) {
	var all []dns.Question
	for _, qtype := range qtypes {
		all = append(all, dns.Question{Name: name + "." + ReplayDomain, Qtype: qtype, Qclass: dns.ClassINET})
	}
	z.questions = append(z.questions, all)
}

// host adds a host with one to four IPv4 addresses. About every other host also has one
// or two IPv6 addresses.
func (z *Zone) host(i int) {
	name := hostOf(i)
	z.addresses(i, name)
	// MX is NODATA.
	z.ask(name, dns.TypeA, dns.TypeAAAA, dns.TypeMX)
}

// addresses adds the addresses of a host.
func (z *Zone) addresses(i int, name string) {
	z.set(name, 1+z.random.IntN(4), func(k int) string { return fmt.Sprintf("A %s", Address(10, 4*i+k)) })
	if z.random.IntN(2) == 0 {
		z.set(name, 1+z.random.IntN(2), func(k int) string {
			ip := [16]byte{0x20, 0x01, 0x0d, 0xb8, 12: byte(i >> 16), 13: byte(i >> 8), 14: byte(i), 15: byte(k)}
			return fmt.Sprintf("AAAA %s", netip.AddrFrom16(ip))
		})
	}
}

// alias adds a chain of one to three CNAMEs to a host.
func (z *Zone) alias(i int) {
	target := hostOf(i)
	z.addresses(i, target)
	links := 1 + z.random.IntN(3)
	for k := range links {
		name := fmt.Sprintf("a%d.%05d", k, i)
		z.record(name, "CNAME %s", target)
		target = name
	}
	z.ask(target, dns.TypeA, dns.TypeAAAA, dns.TypeTXT)
}

// mail adds a domain with mail exchangers and its policy.
func (z *Zone) mail(i int) {
	name := fmt.Sprintf("m%05d", i)
	z.set(name, 1+z.random.IntN(3), func(k int) string { return fmt.Sprintf("MX %d %s", 10*k, hostOf(z.random.IntN(replayNames))) })
	z.record(name, `TXT "v=spf1 ip4:%s -all"`, Address(10, i))
	z.ask(name, dns.TypeMX, dns.TypeTXT, dns.TypeA)
}

// service adds a service with one to four instances.
func (z *Zone) service(i int) {
	name := fmt.Sprintf("_http._tcp.s%05d", i)
	z.set(name, 1+z.random.IntN(4), func(k int) string {
		return fmt.Sprintf("SRV %d 10 %d %s", k, 8000+k, hostOf(z.random.IntN(replayNames)))
	})
	z.ask(name, dns.TypeSRV, dns.TypeA)
}

// texts adds one to three texts of up to a hundred bytes.
func (z *Zone) texts(i int) {
	name := fmt.Sprintf("t%05d", i)
	z.set(name, 1+z.random.IntN(3), func(k int) string {
		return fmt.Sprintf("TXT \"%d\" %q", k, strings.Repeat("t", z.random.IntN(100)))
	})
	z.ask(name, dns.TypeTXT)
}

// missingShare is the share of queries for names that do not exist, in percent.
const missingShare = 15

// Replayed makes n questions: names with Zipf's distribution, the usual type in three of
// four.
func (z *Zone) Replayed(n int) []dns.Question {
	zipf := rand.NewZipf(z.random, 1.1, 10, replayNames-1)
	all := make([]dns.Question, n)
	for i := range all {
		of := int(zipf.Uint64())
		if z.random.IntN(100) < missingShare {
			name := fmt.Sprintf("nx%05d.%s", of, ReplayDomain)
			all[i] = dns.Question{Name: name, Qtype: dns.TypeA, Qclass: dns.ClassINET}
			continue
		}
		can := z.questions[of]
		all[i] = can[0]
		if z.random.IntN(4) == 0 {
			all[i] = can[z.random.IntN(len(can))]
		}
	}
	return all
}
