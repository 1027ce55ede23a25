package agent

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nametap/nametap/internal/chans"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/iptables"
)

const (
	// repairsIn is how long ago the last repair of the rules may be. Loading a firewall repairs them for some seconds, which
	// is no lasting problem: see [condition.Lasting].
	repairsIn = 10 * time.Second
	// lapsesIn is how long ago an interruption of the capture may be.
	lapsesIn = 3 * time.Minute
)

// wayText has what a state of a way means; "%s" is the nameserver.
func wayText(state WayState) condition.Problem {
	return map[WayState]condition.Problem{
		WayBarred: {Severity: condition.Severe, What: "a firewall of this host drops the queries that the agent forwards to %s",
			Effect: "queries go to the nameserver itself, which does not know mesh names", Mend: "allow DNS for the agent's user in that firewall"},
		WayBroken: {Severity: condition.Severe, What: "queries of programs to %s do not reach the agent, although it answers",
			Effect: "they go to the nameserver itself, which does not know mesh names", Mend: "nametap capture check lists the firewall rules to look at"},
		WayElsewhere: {Severity: condition.Minor, What: "nametap cannot check whether queries of programs to %s reach the agent",
			Effect: "queries may go to another server, which does not know mesh names", Mend: "nametap capture check lists the rules of other programs"},
		WaySilent: {Severity: condition.Severe, What: "the agent does not answer queries of programs to %s, nor its own probes",
			Effect: "without an answer the kernel ends the capture: they go to the nameserver itself, which does not know mesh names", Mend: "nametap capture check lists the firewall rules to look at"},
	}[state]
}

// conditions says what is wrong with the capture, as the last check of the rules and the last probes have found it. It
// does not read the kernel. The capture may be nil.
func (c *capture) conditions() []condition.Condition {
	listeners := []condition.Code{condition.ConntrackFull, condition.ListenerSilent}
	changed := append(slices.Clone(listeners), condition.CaptureRepaired)
	all := []condition.Condition{
		{Code: "capture_second_agent", Title: "no other agent captures here"},
		{Code: condition.CaptureAbsent, Title: "the capture rules are in place"},
		{Code: condition.CaptureRepaired, Title: "no other program changes the capture rules", Causes: []condition.Code{condition.CaptureAbsent}},
		{Code: "capture_remains", Title: "rules that are not wanted are removed"},
		{Code: condition.CaptureBarred, Title: "the agent may query nameservers while it captures", Causes: []condition.Code{condition.ListenerSilent}},
		{Code: condition.CaptureBroken, Title: "captured queries reach the agent", Causes: changed},
		{Code: "capture_elsewhere", Title: "no other rules redirect queries", Causes: changed},
		{Code: condition.CaptureEnded, Title: "the rules capture", Causes: append(listeners, condition.CaptureAbsent, condition.CaptureBarred, condition.CaptureBroken)},
		{Code: "capture_interrupted", Title: "nothing interrupts the capture", Causes: []condition.Code{condition.CaptureAbsent, condition.CaptureEnded}},
	}
	if c == nil {
		for i := range all {
			all[i].Unknown = "the agent installs no rules"
		}
		return all
	}
	now, on, begun := time.Now(), c.current().On, chans.Closed(c.kernel.Begun()) // until it has begun, missing rules are no problem
	unprobed := slices.ContainsFunc(c.ways.states(), func(w Way) bool { return w.State == WayUnknown })
	for i, problems := range [][]condition.Problem{
		c.second(), c.absent(), c.changed(now), c.remaining(), c.waysIn(WayBarred), c.waysIn(WayBroken), c.waysIn(WayElsewhere),
		c.ended(now, on, begun), c.interrupted(now),
	} {
		all[i].Problems = problems
		if effect := guardEffect(all[i].Code); effect != "" && c.current().policy.Enforces() {
			for j := range problems {
				problems[j].Effect = effect
			}
		}
		switch {
		case all[i].Code == "capture_second_agent" || all[i].Code == "capture_remains":
		case !begun:
			all[i].Unknown = "the agent has not installed the rules yet"
		case !on:
			all[i].Unknown = "capture is off"
		case unprobed && slices.Contains([]condition.Code{condition.CaptureBarred, condition.CaptureBroken, "capture_elsewhere"}, all[i].Code):
			all[i].Unknown = "not all ways were probed"
		}
	}
	return all
}

// guardEffect returns the effect of a problem if a policy is enforced: then no query goes to a nameserver. It returns "" if the
// effect is the same.
func guardEffect(code condition.Code) string {
	switch code {
	case condition.CaptureBarred, condition.CaptureBroken, "capture_elsewhere", condition.CaptureEnded, "capture_interrupted":
		return "queries have no answer: the guard lets none leave"
	case condition.CaptureAbsent, condition.CaptureRepaired:
		return "meanwhile the guard does not hold"
	}
	return ""
}

func (c *capture) second() (found []condition.Problem) {
	p := condition.Problem{
		Severity: condition.Minor, What: "another agent wants to capture DNS in this network namespace", Effect: "it captures nothing while this agent runs",
		Mend: "end one of the two agents; the other one then captures", Rows: []string{"K23"},
	}
	if c.waits() {
		p.Severity, p.What, p.Effect = condition.Severe, "another agent captures DNS in this network namespace", "this agent captures nothing while that one runs"
	}
	for _, other := range c.seat.others() {
		p.Subject, p.Evidence = other, other
		found = append(found, p)
	}
	return found
}

func (c *capture) absent() (found []condition.Problem) {
	in := c.current()
	for f, level := range c.kernel.Levels() {
		if level != iptables.LevelFailed && (level != iptables.LevelUnavailable || !in.Config.Needs(f)) {
			continue
		}
		why := cmp.Or(in.unserved[f], c.kernel.Failure(f), errors.New("the log says why"))
		found = append(found, condition.Problem{
			Severity: condition.Severe, Subject: f.String(), What: fmt.Sprintf("the rules for %s cannot be installed; retrying", f), Evidence: why.Error(),
			Effect: fmt.Sprintf("queries over %s go to the nameservers, which do not know mesh names", f),
			Mend:   "nametap capture check", Rows: []string{"K9", "K10"},
		})
	}
	return found
}

func (c *capture) changed(now time.Time) []condition.Problem {
	stats := c.kernel.Stats()
	c.mu.Lock()
	defer c.mu.Unlock()
	if stats.Repairs > c.repairs {
		c.repairs, c.repaired = stats.Repairs, now
	}
	ago := now.Sub(c.repaired)
	if ago > repairsIn {
		return nil
	}
	return []condition.Problem{{
		Severity: condition.Minor, What: "another program removes or changes the capture rules again and again",
		Evidence: fmt.Sprintf("%d repairs since the start, the last one up to %v ago: %s", stats.Repairs, ago.Round(time.Second)+time.Second, stats.Drift),
		Effect:   "until each repair, queries go to the nameservers, which do not know mesh names",
		Mend:     "nft monitor shows what changes rules; make that program keep the chains NAMETAP_*", Rows: []string{"K10"},
	}}
}

func (c *capture) remaining() []condition.Problem {
	remains := c.kernel.Remaining()
	if remains == "" {
		return nil
	}
	return []condition.Problem{{
		Severity: condition.Severe, What: "capture rules cannot be removed; retrying", Evidence: remains,
		Effect: "queries are captured although the settings say that they should not be", Mend: "nametap capture remove", Rows: []string{"K10"},
	}}
}

// waysIn returns a problem for each way in a state.
func (c *capture) waysIn(state WayState) (found []condition.Problem) {
	for _, way := range c.ways.states() {
		if way.State == state {
			p := wayText(state)
			p.Subject = way.Subject()
			p.What, p.Evidence, p.Rows = fmt.Sprintf(p.What, p.Subject), way.Detail, []string{"K19"}
			found = append(found, p)
		}
	}
	return found
}

func (c *capture) ended(now time.Time, on, begun bool) []condition.Problem {
	switch {
	case !on:
		return nil
	case c.kernel.Active() || !begun: // the rules of at least one family capture
		return c.waysIn(WaySilent)
	}
	p := condition.Problem{
		Severity: condition.Severe, What: "the rules capture nothing now", Evidence: "the kernel has ended the capture, or no rules are installed",
		Effect: "queries go to the nameservers, which do not know mesh names", Mend: "nametap capture status", Rows: []string{"K9", "K17"},
	}
	for _, lapse := range c.ways.lapses.list() {
		if now.Sub(lapse.Last) <= lapsesIn {
			p.Evidence, p.Mend = lapse.Cause.parts()
		}
	}
	return []condition.Problem{p}
}

// interrupted returns a problem for each cause of recent interruptions.
func (c *capture) interrupted(now time.Time) (found []condition.Problem) {
	for _, lapse := range c.ways.lapses.list() {
		ago := now.Sub(lapse.Last)
		if ago > lapsesIn {
			continue
		}
		cause, look := lapse.Cause.parts()
		found = append(found, condition.Problem{
			Severity: condition.Minor, Subject: cause, What: "the capture was interrupted: " + cause,
			Evidence: fmt.Sprintf("%d times since the start, last %v ago", lapse.Count, ago.Round(time.Second)),
			Effect:   "meanwhile queries go to the nameservers, which do not know mesh names", Mend: look, Rows: []string{"V2"},
		})
	}
	return found
}
