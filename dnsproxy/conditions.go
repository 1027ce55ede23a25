package dnsproxy

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/condition"
)

// Conditions says what is wrong with the listeners, with nameservers and with the answers to queries.
func (s *Server) Conditions() []condition.Condition {
	missing := condition.Condition{Code: "listener_missing", Title: "all DNS listeners are open"}
	for _, err := range s.listeners.Missing() {
		text := err.Error()
		listener, _, _ := strings.Cut(strings.TrimPrefix(text, "listen "), ": ") // as in "listen udp [::1]:15053: bind: …"
		missing.Problems = append(missing.Problems, condition.Problem{
			Severity: condition.Minor, Subject: text, What: "a DNS listener cannot be opened; retrying: " + listener,
			Evidence: text, Effect: "queries of this family and protocol are not answered by the agent",
			Mend: "ss -lnutp shows which program has the port: end it, or set --dns-addr", Rows: []string{"R3"},
		})
	}
	all := append([]condition.Condition{missing}, s.handler.forwarder.Conditions()...)
	failing := s.failing(time.Now())
	for _, c := range all {
		if c.Code == condition.NameserverDown {
			failing.Unknown = c.Unknown // no query was forwarded
		}
	}
	return append(all, failing)
}

// AskNameservers asks all nameservers in use whether they reply, so that the next Conditions knows.
func (s *Server) AskNameservers(ctx context.Context) { s.handler.forwarder.Ask(ctx) }

const (
	// failingDomains is how many domains must have failures with the same cause: if only one domain has them, its own
	// nameservers may be the cause.
	failingDomains = 3
	// failuresSince is how far back failures count, and failuresLast is how long ago the last one may be. The failures
	// must be in at least failuresSlots different periods of the length failuresSlot: a nameserver that is silent for a
	// second causes many failures, but is no problem.
	failuresSince = time.Minute
	failuresLast  = 10 * time.Second
	failuresSlot  = 5 * time.Second
	failuresSlots = 3
)

// failing returns the condition with a problem for each cause of failures of several domains.
func (s *Server) failing(now time.Time) condition.Condition {
	c := condition.Condition{
		Code: "queries_fail", Title: "queries do not fail",
		Causes: append(condition.Unanswered(), condition.ConntrackFull, condition.NameserverTCP, condition.Overflow),
	}
	causes := map[string][]seen.Record{}
	for _, record := range s.handler.seen.Failures(now.Add(-failuresSince)) {
		causes[record.Cause()] = append(causes[record.Cause()], record)
	}
	for _, cause := range slices.Sorted(maps.Keys(causes)) {
		records := causes[cause]
		names, domains, slots := map[string]bool{}, map[string]bool{}, map[int64]bool{}
		for _, record := range records {
			names[record.Name] = true
			domains[s.domainOf(record.Name)] = true
			slots[record.Time.Unix()/int64(failuresSlot.Seconds())] = true
		}
		last := records[len(records)-1]
		ago := now.Sub(last.Time).Round(time.Second)
		if len(domains) < failingDomains || len(slots) < failuresSlots || ago > failuresLast {
			continue
		}
		c.Problems = append(c.Problems, condition.Problem{
			Severity: condition.Minor, Subject: cause, What: "queries fail: " + cause,
			Evidence: fmt.Sprintf("%d queries for %d names, the last %v ago: %s, by %s", len(records), len(names), ago, last.Question(), last.Who()),
			Effect:   "these names do not resolve, or only to stale answers", Mend: "nametap tail --failed --since 5m", Rows: last.Rows,
		})
	}
	return c
}

// domainOf returns the last two labels of a name. If the name is below the cluster domain, it returns the whole name,
// because all names below the cluster domain have the same nameserver.
func (s *Server) domainOf(text string) string {
	text = strings.ToLower(text)
	if name, err := wire.ParseHostname(text); err == nil && name.Below(s.cluster.Domain) {
		return text
	}
	labels := strings.Split(strings.TrimSuffix(text, "."), ".")
	return strings.Join(labels[max(0, len(labels)-2):], ".")
}
