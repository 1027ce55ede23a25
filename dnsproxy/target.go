package dnsproxy

import (
	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/reply"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// askFor makes the question that nameservers are asked. t.ask has its name and its key.
func (h *handler) askFor(t *task) {
	t.ask.Message, t.ask.Trace = t.query.AsSent(), t.query.Trace
	if name := t.decision.asked(&t.query); name != t.query.Name {
		q := &t.query
		message := wire.AppendQuestion(q.Packet[:wire.HeaderLen:wire.HeaderLen], name, q.Type, q.Class)
		t.ask.Message = append(message, q.Packet[q.QuestionEnd:]...)
	}
}

// respondTarget returns the response to a query for a mesh name that leads to another name: the
// nameservers' records for that name, after the CNAME records that lead to it. Without records
// of the queried type, the table's response is returned.
//
// It unpacks as much of the reply as the client has room for: it is for workers alone.
func (h *handler) respondTarget(t *task, found *forward.Result) ([]byte, outcome) {
	q, d, limit := &t.query, &t.decision, h.limit(t.query.UDPSize, t.from.over)
	bad := func() ([]byte, outcome) {
		why := failureOf(forward.ErrBadReply)
		return h.respondFailure(nil, q, why), outcome{why.rcode, found.Source}
	}
	if found.Relayed != nil { // for this client alone
		parsed, err := reply.Parse(found.Relayed)
		if err != nil {
			return bad()
		}
		found.Reply, found.Relayed = parsed, nil
	}
	if found.Reply.Negative() && !found.Reply.Truncated() {
		return h.respondMesh(nil, q, d, limit), outcome{dns.RcodeSuccess, sourceTable}
	}
	prefix := new(dns.Msg)
	if prefix.Unpack(h.respondNames(q, d)) != nil {
		return bad()
	}
	key := forward.Key(q)
	key.Name = string(d.target)
	derived, err := found.Derive(d.target, key, limit, func(msg *dns.Msg) {
		msg.Question = prefix.Question
		if msg.Rcode == dns.RcodeSuccess {
			msg.Answer = append(prefix.Answer, msg.Answer...)
		}
	})
	if err != nil {
		return bad()
	}
	return h.respondReply(nil, q, &derived, limit)
}
