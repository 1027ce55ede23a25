package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/dnsproxy/wire"
)

// A queryTrace is what --trace shows of a question besides its answer. Unknown says which parts could not be read, and
// why.
type queryTrace struct {
	// Candidates are the names that libc queries for the name, up to the one with an answer.
	Candidates []candidate `json:"candidates,omitempty"`
	Table      *tableState `json:"table,omitempty"`
	// Cache is what the cache had before the query; nil if it had nothing.
	Cache   *forward.CacheEntry `json:"cache,omitempty"`
	Unknown []string            `json:"unknown,omitempty"`
}

// A candidate is a name that libc queries, and its answer.
type candidate struct {
	Name   string `json:"name"`
	Rcode  string `json:"rcode"`
	Answer int    `json:"answer"` // the number of records
	From   string `json:"from,omitempty"`
}

// tableState is the table in use.
type tableState struct {
	Version string  `json:"version"`
	Age     float64 `json:"ageSeconds"`
	Stale   bool    `json:"stale,omitempty"`
}

// newTrace reads the parts of a trace that have to be read before the question is asked.
func newTrace(ctx context.Context, status *statusClient, q dns.Question) *queryTrace {
	t := &queryTrace{}
	var state agent.Status
	if t.check("table", status.get(ctx, "/debug/status", nil, &state)) && state.XDS.Loaded {
		t.Table = &tableState{state.XDS.Version, state.XDS.TableAge, state.XDS.Stale}
	}
	var content forward.CacheContent
	if t.check("cache", status.get(ctx, "/debug/cache", url.Values{"name": {q.Name}}, &content)) {
		i := slices.IndexFunc(content.Entries, func(e forward.CacheEntry) bool { return e.Type == wire.TypeName(q.Qtype) })
		if i >= 0 {
			t.Cache = &content.Entries[i]
		}
	}
	return t
}

// check adds err, the error of reading a part, to Unknown. It reports whether err is nil.
func (t *queryTrace) check(part string, err error) bool {
	if err != nil {
		t.Unknown = append(t.Unknown, part+": "+err.Error())
	}
	return err == nil
}

// findCandidates asks the questions that libc asks for a name, unless libc asks only one.
func (t *queryTrace) findCandidates(ctx context.Context, a *asker, name string, qtype uint16) {
	if _, reverse := dns.ReverseAddr(name); reverse == nil || strings.HasSuffix(name, ".") {
		return
	}
	libc, err := dns.ClientConfigFromFile(a.resolvConf)
	if !t.check("search list", err) {
		return
	}
	// NameList always has the name itself, which "." in the search list would add a second time.
	libc.Search = slices.DeleteFunc(libc.Search, func(domain string) bool { return domain == "." })
	for _, full := range libc.NameList(name) {
		result, err := a.ask(ctx, dns.Question{Name: full, Qtype: qtype, Qclass: dns.ClassINET})
		if !t.check("candidate "+full, err) {
			return
		}
		c := candidate{Name: full, Rcode: result.Rcode, Answer: len(result.Answer)}
		if result.From != nil {
			c.From = result.From.Source
		}
		t.Candidates = append(t.Candidates, c)
		if c.Answer > 0 {
			return
		}
	}
}

// print prints the trace. It prints nothing if t is nil.
func (t *queryTrace) print(w io.Writer, r *queryResult) {
	if t == nil {
		return
	}
	if t.Table != nil {
		stale := ""
		if t.Table.Stale {
			stale = ", from the snapshot"
		}
		fmt.Fprintf(w, "  table: %s%s old%s\n", versionText(t.Table.Version), ago(seconds(t.Table.Age)), stale)
	}
	if r.From != nil && r.From.Source != "table" && r.From.Source != "self" {
		fmt.Fprintf(w, "  cache before: %s\n", cacheText(t.Cache))
		t.printAttempts(w, r)
	}
	if len(t.Candidates) > 0 {
		fmt.Fprintln(w, "  candidates of the search list, as libc asks for them:")
		for _, c := range t.Candidates {
			fmt.Fprintf(w, "    %-50s  %-8s  %d records  %s\n", c.Name, c.Rcode, c.Answer, c.From)
		}
	}
	for _, text := range t.Unknown {
		fmt.Fprintf(w, "  unknown: %s\n", text)
	}
	also := "nametap tail --since 10m --no-follow " + strings.TrimSuffix(r.Name, ".")
	if r.Rule != nil && len(r.Rule.Rows) > 0 {
		also += "`, `nametap explain " + strings.Join(r.Rule.Rows, " ")
	}
	fmt.Fprintf(w, "  also: `%s`\n", also)
}

// cacheText says what the cache had for a question.
func cacheText(e *forward.CacheEntry) string {
	switch {
	case e == nil:
		return "nothing"
	case e.Failure != "":
		return "a failure: " + e.Failure
	case e.TTL < 0:
		return fmt.Sprintf("stale: %s of %s, expired %d s ago", e.Rcode, e.Server, -e.TTL)
	}
	return fmt.Sprintf("%s of %s with %d records, for %d s more", e.Rcode, e.Server, e.Records, e.TTL)
}

// printAttempts prints the queries that were sent to each nameserver, and their results.
func (t *queryTrace) printAttempts(w io.Writer, r *queryResult) {
	if len(r.From.Attempts) == 0 {
		if r.From.Source == "upstream" {
			fmt.Fprintln(w,
				"  nameservers: unknown: another client has sent the same query at this time, or the agent is of another version")
		}
		return
	}
	fmt.Fprintln(w, "  nameservers:")
	for i := range r.From.Attempts {
		a := &r.From.Attempts[i]
		if a.Protocol == "" {
			fmt.Fprintf(w, "    %-20s  not asked: %s\n", a.Server, a.Result)
			continue
		}
		fmt.Fprintf(w, "    %-20s  %-3s  +%-8v %s\n", a.Server, a.Protocol, seconds(a.Sent), attemptText(a))
	}
	if more := r.From.MoreAttempts; more > 0 {
		fmt.Fprintf(w, "    and %d more\n", more)
	}
}

// attemptText returns the result of an attempt as text.
func attemptText(a *upstream.Attempt) string {
	text := "no reply"
	if a.Result != "" {
		text = fmt.Sprintf("%s after %s", a.Result, seconds(a.Took))
	} else if a.Patience > 0 {
		text += " within " + seconds(a.Patience).String()
	}
	if a.Usual > 0 {
		text += fmt.Sprintf(" (usually %s)", seconds(a.Usual))
	}
	if a.Repeated {
		text += "; asked because the previous one was late"
	}
	if a.Plain {
		text += "; without EDNS"
	}
	if a.Used {
		text += "  ← used"
	}
	return text
}
