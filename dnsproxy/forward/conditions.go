package forward

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nametap/nametap/dnsproxy/upstream"
	"github.com/nametap/nametap/internal/condition"
)

const (
	// evidenceLasts is how old the evidence for or against a nameserver may be. While queries come, a nameserver that is
	// down is probed every 30 s. Without queries its state is not known.
	evidenceLasts = 45 * time.Second
	// tcpFails is how long queries over TCP must have failed before that is a problem. A single broken connection already
	// makes several queries fail at once.
	tcpFails = 10 * time.Second
	// overflowLasts is how long ago the last query may be that was refused because of a limit.
	overflowLasts = 5 * time.Second
)

// A server is a nameserver in use. It is queried for names below suffix, or for all names without another route.
type server struct {
	upstream.Status
	suffix string
}

// servers returns the nameservers in use, in the order in which they are queried.
func (f *Forwarder) servers() (servers []server) {
	states := map[upstream.Spec]upstream.Status{}
	for _, s := range f.client.Status() {
		states[s.Spec] = s
	}
	current := f.routing.Load()
	for _, r := range append([]route{current.fallback}, current.routes...) {
		for _, spec := range r.servers {
			servers = append(servers, server{states[spec], strings.TrimSuffix(r.suffix.String(), ".")})
		}
	}
	return servers
}

// Ask asks all nameservers in use whether they reply: see [upstream.Client.Ask].
func (f *Forwarder) Ask(ctx context.Context) {
	var specs []upstream.Spec
	for _, s := range f.servers() {
		specs = append(specs, s.Spec)
	}
	f.client.Ask(ctx, specs)
}

// Conditions says what is wrong with the nameservers, and whether queries are refused because of a limit.
func (f *Forwarder) Conditions() []condition.Condition {
	e := examination{now: time.Now(), servers: f.servers()}
	none := condition.Condition{
		Code: condition.NameserversNone, Title: "there is a nameserver",
		Causes: []condition.Code{condition.ResolvConfUnread, condition.ResolvConfEmpty},
	}
	if !slices.ContainsFunc(e.servers, func(s server) bool { return s.suffix == "" }) {
		evidence := "resolv.conf names none"
		if self := f.Self(); len(self) > 0 {
			evidence = fmt.Sprintf("resolv.conf names only this agent: %v", self)
		}
		none.Problems = []condition.Problem{{
			Severity: condition.Severe, What: "the agent has no nameserver", Evidence: evidence, Effect: "no name outside of the mesh resolves",
			Mend: "set --upstream ADDRESS, or name a nameserver in resolv.conf", Rows: []string{"F7"},
		}}
	}
	refused := condition.Condition{
		Code: condition.Overflow, Title: "no query is refused for a limit",
		Causes: append(condition.Unanswered(), condition.ConntrackFull, condition.NameserverTCP),
	}
	if last := f.metrics.lastOverflow.Load(); last != nil && e.now.Sub(*last) <= overflowLasts {
		refused.Problems = []condition.Problem{{
			Severity: condition.Severe, What: "queries are refused because too many wait for nameservers",
			Evidence: fmt.Sprintf("%d refused since the start, and more now", f.metrics.overflows.Load()), Effect: "some names outside of the mesh do not resolve",
			Mend: "nametap top --by client --failed shows which client sends so many", Rows: []string{"F10"},
		}}
	}
	return append([]condition.Condition{none}, append(e.conditions(), refused)...)
}

// An examination examines the nameservers in use.
type examination struct {
	now     time.Time
	servers []server
}

// conditions returns the conditions of the nameservers.
func (e *examination) conditions() []condition.Condition {
	silent := []condition.Code{condition.ListenerSilent, condition.CaptureBarred}
	unsent := append(slices.Clone(silent), condition.ConntrackFull, condition.NameserverBarred)
	return []condition.Condition{
		e.condition(condition.NameserverBarred, "the agent may query nameservers", silent, func(s server) *condition.Problem {
			if !s.Barred || !e.late(s.LastErrorAt) {
				return nil
			}
			return &condition.Problem{
				What: "cannot be queried: a firewall of this host drops the queries of the agent", Evidence: e.lastError(s),
				Mend: "allow DNS for the agent's user in that firewall", Rows: []string{"F4"}, Certain: e.unanswered(s),
			}
		}),
		e.condition(condition.NameserverLoops, "no nameserver forwards to the agent", nil, func(s server) *condition.Problem {
			if s.State != upstream.Looping {
				return nil
			}
			return &condition.Problem{
				What: "forwards to this agent", Evidence: s.Looping, Rows: []string{"F6"},
				Mend: "nametap agent --capture-exclude-uid with the user of that nameserver, or name another one with --upstream",
			}
		}),
		e.condition(condition.NameserverDown, "all nameservers reply", unsent, func(s server) *condition.Problem {
			if s.Barred || !e.unanswered(s) && (s.State != upstream.Down || !e.late(s.LastErrorAt)) {
				return nil
			}
			return &condition.Problem{
				What: "does not reply", Evidence: e.lastError(s), Rows: []string{"F4"}, Certain: e.unanswered(s),
				Mend: dig(s.Spec) + "; if there is no reply, name another nameserver in resolv.conf or --upstream",
			}
		}),
		e.condition(condition.NameserverRefuses, "all nameservers answer", nil, func(s server) *condition.Problem {
			if s.State != upstream.Up || !s.Refusing || !e.late(s.RefusedAt) {
				return nil
			}
			var counts []string
			for _, code := range slices.Sorted(maps.Keys(s.Responses)) {
				if code != "NOERROR" && code != "NXDOMAIN" && s.Responses[code] > 0 {
					counts = append(counts, fmt.Sprintf("%d %s", s.Responses[code], code))
				}
			}
			return &condition.Problem{
				What: "answers no query", Evidence: "the last ten replies at least were no answers: " + strings.Join(counts, ", "),
				Mend: "look at the log of that nameserver, or name another one in resolv.conf or --upstream", Rows: []string{"F3"},
			}
		}),
		e.overTCP(append(unsent, condition.Descriptors, condition.NameserverDown)),
	}
}

// overTCP returns the condition of replies over TCP.
func (e *examination) overTCP(causes []condition.Code) condition.Condition {
	c := e.condition(condition.NameserverTCP, "all nameservers reply over TCP", causes, func(s server) *condition.Problem {
		if s.State != upstream.Up || s.TCP.LastError == "" || s.TCP.LastErrorAt.Sub(s.TCP.Since) < tcpFails || !e.late(s.TCP.LastErrorAt) {
			return nil
		}
		return &condition.Problem{
			What: "does not reply over TCP", Rows: []string{"F2"},
			Evidence: fmt.Sprintf("%s, %v ago; no reply over TCP for %v", s.TCP.LastError, e.ago(s.TCP.LastErrorAt), e.ago(s.TCP.Since)),
			Mend:     dig(s.Spec) + " +tcp; allow TCP to that nameserver in the firewalls on the way",
		}
	})
	for i := range c.Problems {
		c.Problems[i].Severity, c.Problems[i].Effect = condition.Minor, "long answers, which do not fit in a UDP packet, arrive truncated or not at all"
	}
	if c.Unknown == "" && slices.ContainsFunc(e.servers, func(s server) bool { return !e.late(s.TCP.Heard) && !s.Spec.TLS }) {
		c.Unknown = "not all nameservers were asked over TCP"
	}
	return c
}

// condition returns a condition with the problems that the function find has found, completed by the server, the
// severity and the effect.
func (e *examination) condition(code condition.Code, title string, causes []condition.Code, find func(server) *condition.Problem) condition.Condition {
	c := condition.Condition{Code: code, Title: title, Causes: causes}
	if len(e.servers) == 0 {
		c.Unknown = "there is no nameserver"
	}
	for _, s := range e.servers {
		if !e.late(s.Heard) && c.Unknown == "" {
			c.Unknown = fmt.Sprintf("%s has sent no reply in the last %v", s.Spec, evidenceLasts)
		}
		p := find(s)
		if p == nil {
			continue
		}
		group := slices.DeleteFunc(slices.Clone(e.servers), func(other server) bool { return other.suffix != s.suffix })
		i := slices.IndexFunc(group, func(other server) bool { return other.Spec == s.Spec })
		names, of := "outside of the mesh", ""
		if s.suffix != "" {
			names, of = "below "+s.suffix, " of "+s.suffix
		}
		p.Subject, p.Severity, p.Effect = s.Spec.String()+of, condition.Severe, "no name "+names+" resolves, except those in the cache"
		p.What = s.Spec.String() + ", " + ordinal(i, len(group)) + of + ", " + p.What
		if slices.ContainsFunc(group, func(other server) bool { return other.Spec != s.Spec && e.answers(other) }) {
			p.Severity, p.Effect = condition.Minor, "none while another nameserver answers"
		}
		c.Problems = append(c.Problems, *p)
	}
	return c
}

// answers reports whether a nameserver answers, as far as is known.
func (e *examination) answers(s server) bool {
	return s.State == upstream.Up && !s.Refusing && !e.unanswered(s)
}

// unanswered reports whether a nameserver did not reply when a person wanted to know.
func (e *examination) unanswered(s server) bool {
	return e.late(s.Unanswered) && s.Unanswered.After(s.Heard)
}

// late reports whether something was seen lately.
func (e *examination) late(t time.Time) bool { return e.now.Sub(t) <= evidenceLasts }

// ago returns how long ago a time was.
func (e *examination) ago(t time.Time) time.Duration { return e.now.Sub(t).Round(time.Second) }

// lastError returns the last error of a nameserver, and the time since then.
func (e *examination) lastError(s server) string {
	return fmt.Sprintf("%s, %v ago", s.LastError, e.ago(s.LastErrorAt))
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

// dig returns the command that queries a nameserver.
func dig(s upstream.Spec) string {
	return strings.Replace(fmt.Sprintf("dig @%s -p %d%s example.org", s.Addr.Addr(), s.Addr.Port(), map[bool]string{true: " +tls"}[s.TLS]), " -p 53 ", " ", 1)
}
