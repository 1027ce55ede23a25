package random

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/api"
	"github.com/nametap/nametap/internal/testkit/fakedns"
)

// The names of the queries. What a nameserver answers follows from the name, the type and the
// nameserver's group. The first letter says what it is, for the types A, AAAA and TXT:
//
//	p  up to three records  n  NXDOMAIN
//	o  NODATA               s  SERVFAIL
//	b  as p, but long       c  a CNAME and p
//	d  SERVFAIL, but as p with CD
//	h  NXDOMAIN, but the table has it, from h100 on in every second group of four generations
//
// Names below route.example have nameservers of their own at times.
const forwardedKinds = "ppppppponnncbbds"

const (
	meshHosts, flappingHosts = 100, 20
	meshDomain               = ".ns1.svc.cluster.local."
	searched                 = "corp.test."
	routed                   = "route.example."
)

// A question is one query of a client.
type question struct {
	name   string // as sent; its letters are in any case
	qtype  uint16
	id     uint16
	edns   uint16 // UDP size; zero means without EDNS
	do, cd bool
	again  bool // others ask the same
	host   int  // of the mesh; -1 if it is none
	tcp    bool
	sent   time.Time
}

// message returns the query's message.
func (q *question) message() *dns.Msg {
	m := new(dns.Msg).SetQuestion(q.name, q.qtype)
	m.Id, m.CheckingDisabled = q.id, q.cd
	if q.edns > 0 {
		m.SetEdns0(q.edns, q.do)
	}
	return m
}

func (q *question) String() string {
	kind := dns.TypeToString[q.qtype]
	return fmt.Sprintf("%s %s (id %d, edns %d, do %v, cd %v, tcp %v)", q.name, kind, q.id, q.edns, q.do, q.cd, q.tcp)
}

// randomQuestion returns a question with everything but an ID. Names are from a few that stay in the cache, or
// are asked for once.
func randomQuestion(r *rand.Rand) *question {
	q := &question{qtype: []uint16{dns.TypeA, dns.TypeA, dns.TypeA, dns.TypeAAAA, dns.TypeTXT}[r.IntN(5)]}
	if r.IntN(3) > 0 {
		q.edns = []uint16{512, 1232, 1232, 4096}[r.IntN(4)]
		q.do = r.IntN(3) == 0
	}
	q.cd = r.IntN(6) == 0
	n := r.IntN(200)
	if q.again, q.host = r.IntN(3) > 0, -1; !q.again {
		n = 200 + r.IntN(1<<40)
	}
	label := string(forwardedKinds[r.IntN(len(forwardedKinds))]) + strconv.Itoa(n) + "."
	switch kind := r.IntN(13); {
	case kind < 4: // short, whole, and below the search list (N5)
		q.host = r.IntN(meshHosts)
		q.name = "h" + strconv.Itoa(q.host) + []string{".", ".ns1.", ".ns1.svc.", meshDomain}[r.IntN(4)] + []string{"", "", searched}[r.IntN(3)]
	case kind == 4:
		q.again, q.host = true, meshHosts+r.IntN(flappingHosts)
		q.name = "h" + strconv.Itoa(q.host) + meshDomain
	case kind < 8:
		q.name = label + routed
	case kind == 8:
		q.name = label + searched
	default:
		q.name = label + "main.example."
	}
	if r.IntN(3) == 0 {
		b := []byte(q.name)
		for i, c := range b {
			if 'a' <= c && c <= 'z' {
				b[i] ^= byte(r.IntN(2) << 5)
			}
		}
		q.name = string(b)
	}
	return q
}

// inTable reports whether the table of a generation has a mesh host.
func inTable(host, generation int) bool { return host < meshHosts || (generation/4+host)%2 == 0 }

// meshAddress returns the address of a host in a generation.
func meshAddress(host, generation int) string {
	return fmt.Sprintf("10.%d.%d.%d", 200+generation>>8%50, generation&255, host)
}

// tableOf returns the table of a generation.
func tableOf(generation int) *api.NameTable {
	table := map[string]*api.NameTable_NameInfo{}
	for host := range meshHosts + flappingHosts {
		if name := "h" + strconv.Itoa(host); inTable(host, generation) {
			table[strings.TrimSuffix(name+meshDomain, ".")] = &api.NameTable_NameInfo{
				Ips: []string{meshAddress(host, generation)}, Registry: "Kubernetes", Shortname: name, Namespace: "ns1",
			}
		}
	}
	return &api.NameTable{Table: table}
}

// hashOf returns the hash of a name in lower case.
func hashOf(name string) uint32 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(name)) // never fails
	return hash.Sum32()
}

// replyOf returns the reply of a group of nameservers to a query.
func replyOf(query *dns.Msg, group int) *dns.Msg {
	reply := new(dns.Msg).SetReply(query)
	reply.RecursionAvailable, reply.Compress = true, true
	q := query.Question[0]
	do := false
	if opt := query.IsEdns0(); opt != nil {
		do = opt.Do()
		reply.SetEdns0(1232, do)
	}
	lower := strings.ToLower(q.Name)
	hash, kind := hashOf(lower), lower[0]
	record := func(owner, text string) dns.RR {
		rr, err := dns.NewRR(fmt.Sprintf("%s %d IN %s", owner, []uint32{0, 1, 2, 30, 3600}[hash%5], text))
		if err != nil {
			panic(err)
		}
		return rr
	}
	owner, count := q.Name, 1+int(hash%3)
	switch {
	case kind == 's' || kind == 'd' && !query.CheckingDisabled:
		reply.Rcode = dns.RcodeServerFailure
		return reply
	case kind == 'n' || kind == 'h':
		reply.Rcode = dns.RcodeNameError
		count = 0
	case kind == 'o':
		count = 0
	case kind == 'b':
		count = 100
	case kind == 'c':
		owner = fmt.Sprintf("p%d.target.example.", hash)
		reply.Answer = append(reply.Answer, record(q.Name, "CNAME "+owner))
	}
	for i := range count {
		address := fmt.Sprintf("10.%d.%d.%d", 64+group, byte(hash>>8), byte(hash+uint32(i)))
		data := map[uint16]string{dns.TypeA: "A ", dns.TypeAAAA: "AAAA fd00::ffff:", dns.TypeTXT: "TXT "}[q.Qtype]
		reply.Answer = append(reply.Answer, record(owner, data+address))
	}
	if len(reply.Answer) == 0 {
		reply.Ns = []dns.RR{record("example.", fmt.Sprintf("SOA ns.example. mbox.example. %d 1 1 1 %d", group, hash%5))}
	} else if do {
		signature := fmt.Sprintf("RRSIG %s 13 3 1 20300101000000 20200101000000 1 example. c2lnbmVk", dns.TypeToString[q.Qtype])
		reply.Answer = append(reply.Answer, record(q.Name, signature))
	}
	return reply
}

// groupHandler returns the handler of the servers of a group.
func groupHandler(group int) fakedns.Handler {
	return func(query *dns.Msg, network string) *dns.Msg {
		if query.Question[0].Qclass == dns.ClassCHAOS {
			return new(dns.Msg).SetRcode(query, dns.RcodeRefused)
		}
		reply := replyOf(query, group)
		if network == "udp" {
			limit := dns.MinMsgSize
			if opt := query.IsEdns0(); opt != nil {
				limit = max(limit, int(opt.UDPSize()))
			}
			reply.Truncate(limit)
		}
		return reply
	}
}

// sameRecords returns an error unless a response has the wanted records in a section. Their order and their TTLs
// may differ, but no TTL is longer than wanted, or than the 30 s of a stale answer (F9). part allows some to be
// missing.
func sameRecords(got, want []dns.RR, part bool) error {
	texts := func(records []dns.RR) []string {
		var all []string
		for _, rr := range records {
			text := rr.String()
			_, data, _ := strings.Cut(text[len(rr.Header().Name)+1:], "\t")
			all = append(all, strings.ToLower(rr.Header().Name+" "+data)) // a name in data may be compressed to one in the question
		}
		slices.Sort(all)
		return all
	}
	if len(got) == 0 && (part || len(want) == 0) {
		return nil
	}
	have, wanted := texts(got), texts(want)
	if part {
		wanted = slices.DeleteFunc(wanted, func(text string) bool { return !slices.Contains(have, text) })
	}
	if !slices.Equal(have, wanted) {
		return errors.New("other records")
	}
	for _, rr := range got {
		if ttl := rr.Header().Ttl; ttl > max(want[0].Header().Ttl, 30) {
			return fmt.Errorf("a TTL of %d", ttl)
		}
	}
	return nil
}
