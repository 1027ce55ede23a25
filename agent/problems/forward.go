package problems

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/seen"
	"github.com/nametap/nametap/dnsproxy/upstream"
)

const (
	// failing is how many domains must have failures with the same reason: if only one domain has them, its own
	// nameservers may be the cause.
	failing = 3
	// FailuresSince is how far back failures count. failuresLast is how long ago the last failure may be. The failures
	// must be in at least failuresSlots different periods of the length failuresSlot: a nameserver that is silent for a
	// second causes many failures, but is no problem.
	FailuresSince = time.Minute
	failuresLast  = 10 * time.Second
	failuresSlot  = 5 * time.Second
	failuresSlots = 3
)

// unanswered returns the problems that keep nameservers from answering the agent.
func unanswered() []Code {
	return []Code{NameserversNone, CaptureBarred, NameserverBarred, NameserverDown, NameserverLoops, NameserverRefuses}
}

// forwardChecks returns the checks of nameservers.
func forwardChecks() []check {
	return []check{
		{code: NameserversNone, title: "there is a nameserver", grounds: []Code{ResolvConfUnread, ResolvConfEmpty}, find: nameserversNone},
		{code: CaptureBarred, title: "the agent may query nameservers while it captures", grounds: []Code{ListenerSilent}, find: ways(WayBarred)},
		{code: NameserverBarred, title: "the agent may query nameservers", grounds: []Code{ListenerSilent, CaptureBarred}, find: nameserverBarred},
		{code: NameserverLoops, title: "no nameserver forwards to the agent", find: nameserverLoops},
		{code: NameserverDown, title: "all nameservers reply", grounds: []Code{ConntrackFull, ListenerSilent, CaptureBarred, NameserverBarred}, find: nameserverDown},
		{code: NameserverRefuses, title: "all nameservers answer", find: nameserverRefuses},
		{code: NameserverTCP, title: "all nameservers reply over TCP", grounds: []Code{Descriptors, ConntrackFull, ListenerSilent, CaptureBarred, NameserverBarred, NameserverDown}, find: nameserverTCP},
	}
}

// queryChecks returns the checks of queries. Problems of nameservers explain what these checks find.
func queryChecks() []check {
	explained := append(unanswered(), ConntrackFull, NameserverTCP)
	return []check{
		{code: Overflow, title: "no query is refused for a limit", grounds: explained, find: overflow},
		{code: QueriesFail, title: "queries do not fail", grounds: append(explained, Overflow), find: queriesFail},
	}
}

func nameserversNone(r *Readings) []Problem {
	if slices.ContainsFunc(r.Agent.Servers, func(s Server) bool { return s.Suffix == "" }) {
		return nil
	}
	evidence := "resolv.conf names none"
	if len(r.Agent.Self) > 0 {
		evidence = "resolv.conf names only this agent: " + strings.Join(r.Agent.Self, ", ")
	}
	return []Problem{{
		Severity: Severe, What: "the agent has no nameserver",
		Evidence: evidence, Effect: "no name outside of the mesh resolves",
		Mend: "set --upstream ADDRESS, or name a nameserver in resolv.conf", Rows: []string{"F7"},
	}}
}

// ill calls the function problem for each nameserver for which match returns true. It adds the subject, the severity
// and the effect to each problem, and returns the problems.
func ill(r *Readings, match func(Server) bool, problem func(s Server) Problem) (found []Problem) {
	for _, s := range r.Agent.Servers {
		if !match(s) {
			continue
		}
		group := slices.DeleteFunc(slices.Clone(r.Agent.Servers), func(other Server) bool { return other.Suffix != s.Suffix })
		i := slices.IndexFunc(group, func(other Server) bool { return other.Spec == s.Spec })
		names, of := "outside of the mesh", ""
		if s.Suffix != "" {
			names, of = "below "+s.Suffix, " of "+s.Suffix
		}
		p, name := problem(s), s.Spec.String()
		p.Subject, p.Severity = name+of, Severe
		p.What = name + ", " + ordinal(i, len(group)) + of + ", " + p.What
		p.Effect = "no name " + names + " resolves, except those in the cache"
		if r.Agent.otherAnswers(s) {
			p.Severity, p.Effect = Minor, "none while another nameserver answers"
		}
		found = append(found, p)
	}
	return found
}

// ordinal describes the nameserver with the index i in a list of n.
func ordinal(i, n int) string {
	switch {
	case n == 1:
		return "the only nameserver"
	case i < 3:
		return "the " + [...]string{"first", "second", "third"}[i] + " nameserver"
	}
	return fmt.Sprintf("nameserver %d of %d", i+1, n)
}

// nameserverBarred finds nameservers that the agent may not query.
func nameserverBarred(r *Readings) []Problem {
	return ill(r, func(s Server) bool { return s.barred(r.Now) }, func(s Server) Problem {
		return Problem{
			What: "cannot be queried: a firewall of this host drops the queries of the agent", Evidence: s.lastErrorText(r.Now),
			Mend: "allow DNS for the agent's user in that firewall", Rows: []string{"F4"},
		}
	})
}

// tcpFails is how long queries over TCP must have failed before that is a problem. A single broken connection already
// makes several queries fail at once.
const tcpFails = 10 * time.Second

func nameserverTCP(r *Readings) []Problem {
	found := ill(r, func(s Server) bool {
		return s.State == upstream.Up && s.TCP.LastError != "" && s.TCP.LastErrorAt.Sub(s.TCP.Since) >= tcpFails && r.Now.Sub(s.TCP.LastErrorAt) <= serverLast
	}, func(s Server) Problem {
		return Problem{
			What: "does not reply over TCP", Evidence: fmt.Sprintf("%s, %v ago; no reply over TCP for %v", s.TCP.LastError, r.Now.Sub(s.TCP.LastErrorAt).Round(time.Second), r.Now.Sub(s.TCP.Since).Round(time.Second)),
			Mend: "dig +tcp @" + dig(s.Spec) + " example.org; allow TCP to that nameserver in the firewalls on the way", Rows: []string{"F2"},
		}
	})
	for i := range found {
		found[i].Severity, found[i].Effect = Minor, "long answers, which do not fit in a UDP packet, arrive truncated or not at all"
	}
	return found
}

// dig returns a nameserver as arguments of the command dig.
func dig(server upstream.Spec) string { return strings.Replace(server.String(), ":", " -p ", 1) }

func nameserverDown(r *Readings) []Problem {
	return ill(r, func(s Server) bool {
		return s.State == upstream.Down && !s.Barred && r.Now.Sub(s.LastErrorAt) <= serverLast
	}, func(s Server) Problem {
		return Problem{
			What: "does not reply", Evidence: s.lastErrorText(r.Now),
			Mend: "dig @" + dig(s.Spec) + " example.org; if there is no reply, name another nameserver in resolv.conf or --upstream", Rows: []string{"F4"},
		}
	})
}

func nameserverLoops(r *Readings) []Problem {
	return ill(r, func(s Server) bool { return s.State == upstream.Looping }, func(Server) Problem {
		return Problem{
			What: "forwards to this agent", Evidence: "a probe for it came back",
			Mend: "nametap agent --capture-exclude-uid with the user of that nameserver, or name another one with --upstream", Rows: []string{"F6"},
		}
	})
}

func nameserverRefuses(r *Readings) []Problem {
	return ill(r, func(s Server) bool {
		return s.State == upstream.Up && s.Refusing && r.Now.Sub(s.RefusedAt) <= serverLast
	}, func(s Server) Problem {
		var counts []string
		for _, code := range slices.Sorted(maps.Keys(s.Responses)) {
			if code != "NOERROR" && code != "NXDOMAIN" && s.Responses[code] > 0 {
				counts = append(counts, fmt.Sprintf("%d %s", s.Responses[code], code))
			}
		}
		return Problem{
			What: "answers no query", Evidence: "the last ten replies at least were no answers: " + strings.Join(counts, ", "),
			Mend: "look at the log of that nameserver, or name another one in resolv.conf or --upstream", Rows: []string{"F3"},
		}
	})
}

func overflow(r *Readings) []Problem {
	if !r.Agent.Refusing {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: "queries are refused because too many wait for nameservers",
		Evidence: fmt.Sprintf("%d refused since the start, and more now", r.Agent.Refused), Effect: "some names outside of the mesh do not resolve",
		Mend: "nametap tail shows which client sends so many", Rows: []string{"F10"},
	}}
}

// queriesFail finds the reasons why queries for names of several domains fail.
func queriesFail(r *Readings) (found []Problem) {
	reasons := map[string][]seen.Record{}
	for _, record := range r.Agent.Failures {
		if r.Now.Sub(record.Time) <= FailuresSince {
			reason := reasonOf(record)
			reasons[reason] = append(reasons[reason], record)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		records := reasons[reason]
		names, domains, slots := map[string]bool{}, map[string]bool{}, map[int64]bool{}
		for _, record := range records {
			names[record.Name] = true
			domains[r.Agent.domainOf(record.Name)] = true
			slots[record.Time.Unix()/int64(failuresSlot.Seconds())] = true
		}
		last := records[len(records)-1]
		if len(domains) < failing || len(slots) < failuresSlots || r.Now.Sub(last.Time) > failuresLast {
			continue
		}
		client := last.Client.Addr().String()
		if last.Unit != "" {
			client = last.Unit
		}
		found = append(found, Problem{
			Severity: Minor, Subject: reason, What: "queries fail: " + reason,
			Evidence: fmt.Sprintf("%d queries for %d names, the last %v ago: %s %s, by %s", len(records), len(names),
				r.Now.Sub(last.Time).Round(time.Second), strings.TrimSuffix(last.Name, "."), last.Type, client),
			Effect: "these names do not resolve, or only to stale answers", Mend: "nametap tail --failed --since 5m", Rows: last.Rows,
		})
	}
	return found
}

// reasonOf returns why a query has failed. The text does not contain the name in the query, so it is the same for other
// names.
func reasonOf(record seen.Record) string {
	switch {
	case record.Reason != "" && !strings.Contains(record.Reason, strings.TrimSuffix(record.Name, ".")):
		return record.Reason
	case record.Server != "":
		return record.Server + ": " + record.Rcode
	}
	return record.Rcode
}
