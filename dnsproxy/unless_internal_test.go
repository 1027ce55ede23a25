package dnsproxy

import (
	"errors"
	"os"
	"testing"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/table"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// TestUnless checks that the table answers if nameservers deny the name or fail, and otherwise their reply counts.
func TestUnless(t *testing.T) { // N5, N8
	t.Parallel()
	server, err := New(Config{Forward: forward.Config{ResolvConf: os.DevNull}})
	if err != nil {
		t.Fatal(err)
	}
	h := server.handler.inUse.Load()
	query := new(dns.Msg).SetQuestion("db.corp.example.", dns.TypePTR)
	result := func(rcode int, answers ...dns.RR) *forward.Result {
		msg := new(dns.Msg).SetRcode(query, rcode)
		msg.Answer = answers
		packed, err := msg.Pack()
		if err != nil {
			t.Fatal(err)
		}
		parsed, err := reply.Parse(packed)
		if err != nil {
			t.Fatal(err)
		}
		return &forward.Result{Reply: parsed, Source: sourceUpstream}
	}
	alias := &dns.CNAME{Hdr: dns.RR_Header{Name: "db.corp.example.", Rrtype: dns.TypeCNAME, Class: dns.ClassINET}, Target: "x."}
	for _, c := range []struct {
		found  *forward.Result
		target wire.Name
		rcode  int
		source string
	}{
		{result(dns.RcodeNameError), "\x02db\x04corp\x07example", dns.RcodeSuccess, sourceTable},
		{result(dns.RcodeServerFailure), "\x02db\x04corp\x07example", dns.RcodeSuccess, sourceTable},
		{&forward.Result{Err: errors.New("silent")}, "\x02db", dns.RcodeSuccess, sourceTable},
		{result(dns.RcodeNameError, alias), "\x02db\x04corp\x07example", dns.RcodeNameError, sourceUpstream},
		{result(dns.RcodeSuccess), "\x02db\x04corp\x07example", dns.RcodeSuccess, sourceUpstream},
		{result(dns.RcodeSuccess), "\x02db", dns.RcodeNameError, sourceSelf},
	} {
		packed, err := query.Pack()
		task := newTask()
		task.begin(packed, &arrival{protocol: overTCP})
		if err != nil || !task.query.Parse(packed) {
			t.Fatal(err)
		}
		task.decision = decision{action: actUnless, target: c.target}
		task.decision.match = table.Match{Rule: table.RulePTR, Pointers: []wire.Name{"\x03web"}}
		task.decision.keep()
		response, got := h.respondResult(nil, task, c.found)
		if got != (outcome{c.rcode, c.source}) || c.source == sourceTable && wire.Count(response, wire.AnswerSection) != 1 {
			t.Errorf("for target %s: %v from %q", c.target, got, response)
		}
	}
}
