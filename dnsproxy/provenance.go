package dnsproxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A Provenance says where one answer came from, for example from the cache. It is sent in the answer itself, as an
// EDNS option between a client and this agent. So it describes this answer, even if the cache changes afterwards. In
// contrast, an [Explanation] says how a question is answered in general. It does not depend on the cache and the
// nameservers.
type Provenance struct {
	// Source is where the answer came from: table, cache, stale, cached_failure, upstream or self, as in metrics.
	Source string `json:"source"`
	// Server is the nameserver that sent the reply; empty if the answer is not a nameserver's reply.
	Server string `json:"server,omitempty"`
	// AgeSeconds is how long the reply was in the cache.
	AgeSeconds int `json:"ageSeconds"`
	// ExpiredSeconds is how long ago a stale reply expired.
	ExpiredSeconds int `json:"expiredSeconds,omitempty"`
	// Failure says why nameservers have not answered, if the reply is stale or a failure.
	Failure string `json:"failure,omitempty"`
	// Rows has the row of docs/behaviour.md that describes answers from the cache. It is empty for other answers.
	Rows []string `json:"rows,omitempty"`
	// Attempts has what the agent sent to nameservers for this query, if the query asks for attempts. It is empty
	// for an answer from the cache. If another client's query for the same question was in flight already, some
	// attempts may be missing.
	Attempts []upstream.Attempt `json:"attempts,omitempty"`
	// MoreAttempts is the number of attempts that are left out because they do not fit into the response.
	MoreAttempts int `json:"moreAttempts,omitempty"`
}

// errNoProvenance is the error of ReadProvenance for a response that has no Provenance.
var errNoProvenance = errors.New(
	"the server does not say where its answer comes from: it may be another version, or no nametap agent")

// AskProvenance adds to a query the option that asks for the [Provenance] of its answer, with Attempts if trace is
// true. The query must have an OPT record.
func AskProvenance(query *dns.Msg, trace bool) {
	mark := wire.ProvenanceMark
	if trace {
		mark = wire.TraceMark
	}
	opt := query.IsEdns0()
	opt.Option = append(opt.Option, &dns.EDNS0_LOCAL{Code: wire.Provenance, Data: []byte(mark)})
}

// ReadProvenance returns the provenance in the response to a query that [AskProvenance] prepared.
func ReadProvenance(response *dns.Msg) (p Provenance, err error) {
	if opt := response.IsEdns0(); opt != nil {
		for _, option := range opt.Option {
			local, ok := option.(*dns.EDNS0_LOCAL)
			if ok && local.Code == wire.Provenance && len(local.Data) > len(wire.ProvenanceMark) &&
				string(local.Data) != wire.TraceMark {
				if err := json.Unmarshal(local.Data[len(wire.ProvenanceMark):], &p); err != nil {
					return p, fmt.Errorf("reading where the answer comes from: %w", err)
				}
				return p, nil
			}
		}
	}
	return p, errNoProvenance
}

// seconds returns a text for n seconds.
func seconds(n int) string {
	const minute = 60
	if n < minute {
		return fmt.Sprintf("%d s", n)
	}
	return (time.Duration(n) * time.Second).String()
}

// provenanceOf returns the provenance of a result of the forwarder, with its attempts if trace is set.
func provenanceOf(found *forward.Result, trace bool) *Provenance {
	p := &Provenance{Source: found.Source, Failure: failure{err: errors.New(found.Failure())}.text()}
	if found.Err == nil {
		p.Server = found.Server
	}
	switch found.Source {
	case forward.SourceStale:
		p.AgeSeconds, p.ExpiredSeconds = int(found.Age.Seconds), int(found.Expired()/time.Second)
		p.Rows = []string{"F9"}
	case forward.SourceCache, forward.SourceCachedFailure:
		p.AgeSeconds = int(found.Age.Seconds)
		p.Rows = []string{"F8"}
	}
	if trace {
		p.Attempts = found.Attempts()
	}
	return p
}

// String says in words where an answer came from. It is empty if the answer was made by the agent itself; such an
// answer is described by its [Explanation].
func (p Provenance) String() string {
	text := ""
	switch p.Source {
	case sourceUpstream:
		if p.Server != "" {
			text = "nameserver " + p.Server
		}
		return text
	case sourceCache:
		text = fmt.Sprintf("the cache: nameserver %s replied %s ago", p.Server, seconds(p.AgeSeconds))
	case sourceStale:
		text = fmt.Sprintf("the cache: nameserver %s replied %s ago, expired %s ago", p.Server, seconds(p.AgeSeconds),
			seconds(p.ExpiredSeconds))
	case forward.SourceCachedFailure:
		text = "the cache: nameservers failed a moment ago"
	}
	if p.Failure != "" {
		text += ": " + p.Failure
	}
	return text
}
