package problems

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// localChecks returns the checks of what the agent has on its host.
func localChecks() []check {
	return []check{
		{code: AddressTaken, title: "all addresses of the agent are open", find: addressTaken},
		{code: ListenerMissing, title: "all DNS listeners are open", find: listenerMissing},
		{code: ListenerSilent, title: "all DNS listeners answer", find: listenerSilent},
		{code: StateDir, title: "the table is saved in the state directory", find: stateDir},
	}
}

// captureChecks returns the checks of capture.
func captureChecks() []check {
	listeners := []Code{ListenerSilent}
	return []check{
		{code: CaptureAbsent, title: "the capture rules are in place", find: captureAbsent},
		{code: CaptureRemains, title: "rules that are not wanted are removed", find: captureRemains},
		{code: CaptureBarred, title: "the agent may query nameservers", grounds: listeners, find: ways(CaptureBarred)},
		{code: CaptureBroken, title: "captured queries reach the agent", grounds: listeners, find: ways(CaptureBroken)},
		{code: CaptureElsewhere, title: "no other rules redirect queries", grounds: listeners, find: ways(CaptureElsewhere)},
		{code: CaptureEnded, title: "the rules capture", grounds: []Code{ListenerSilent, CaptureAbsent, CaptureBarred, CaptureBroken}, find: captureEnded},
	}
}

func addressTaken(r *Readings) (found []Problem) {
	for _, text := range r.Agent.Unserved {
		found = append(found, Problem{
			Severity: Minor, Subject: text, What: "an address of the agent, not for DNS, cannot be opened; retrying",
			Evidence: text, Effect: "probes, metrics, commands or connections to VIPs may not reach the agent",
			Mend: "ss -lntp shows which program has the port: end that program", Rows: []string{"R3"},
		})
	}
	return found
}

func listenerMissing(r *Readings) (found []Problem) {
	for _, text := range r.Agent.Missing {
		found = append(found, Problem{
			Severity: Minor, Subject: text, What: "a DNS listener cannot be opened; retrying",
			Evidence: text, Effect: "queries of this family and protocol are not answered by the agent",
			Mend: "ss -lnutp shows which program has the port: end it, or set --dns-addr", Rows: []string{"R3"},
		})
	}
	return found
}

func listenerSilent(r *Readings) []Problem {
	if len(r.Agent.Silent) == 0 {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: "DNS listeners of the agent do not answer",
		Evidence: strings.Join(r.Agent.Silent, "; "), Effect: "queries that these listeners get have no answer",
		Mend: "look for a firewall that drops packets on loopback: nametap capture check", Rows: []string{"R2", "K21"},
	}}
}

func stateDir(r *Readings) []Problem {
	if r.Agent.XDS.SnapshotError == "" {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: "the table cannot be saved in " + r.Agent.StateDir, Evidence: r.Agent.XDS.SnapshotError,
		Effect: "after a restart without the control plane no mesh name resolves",
		Mend:   "let the agent's user write to " + r.Agent.StateDir + ", or set --state-dir", Rows: []string{"C7"},
	}}
}

func captureAbsent(r *Readings) (found []Problem) {
	if r.Agent.Capture == nil {
		return nil
	}
	for _, family := range slices.Sorted(maps.Keys(r.Agent.Capture.Failed)) {
		found = append(found, Problem{
			Severity: Severe, Subject: family, What: "the rules for " + family + " cannot be installed; retrying",
			Evidence: r.Agent.Capture.Failed[family], Effect: "queries over " + family + " go to the nameservers, which do not know mesh names",
			Mend: "nametap capture check", Rows: []string{"K9", "K10"},
		})
	}
	return found
}

func captureRemains(r *Readings) []Problem {
	if r.Agent.Capture == nil || r.Agent.Capture.Remains == "" {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: "capture rules cannot be removed; retrying", Evidence: r.Agent.Capture.Remains,
		Effect: "queries are captured although the settings say that they are not", Mend: "nametap capture remove", Rows: []string{"K10"},
	}}
}

// ways returns the check for one state of ways.
func ways(code Code) func(*Readings) []Problem {
	texts := map[Code]Problem{
		CaptureBarred: {Subject: "barred", Severity: Severe, What: "a firewall of this host drops the queries that the agent forwards to %s",
			Effect: "queries go to the nameserver itself, which does not know mesh names", Mend: "allow DNS for the agent's user in that firewall"},
		CaptureBroken: {Subject: "broken", Severity: Severe, What: "queries of programs to %s do not reach the agent, although it answers",
			Effect: "they go to the nameserver itself, which does not know mesh names", Mend: "nametap capture check lists the firewall rules to look at"},
		CaptureElsewhere: {Subject: "elsewhere", Severity: Minor, What: "whether queries of programs to %s reach the agent cannot be checked",
			Effect: "queries may go to another server, which does not know mesh names", Mend: "nametap capture check lists the rules of other programs"},
		CaptureEnded: {Subject: "silent", Severity: Severe, What: "the agent does not answer queries of programs to %s, nor its own probes",
			Effect: "without an answer the kernel ends the capture: they go to the nameserver itself, which does not know mesh names", Mend: "nametap capture check lists the firewall rules to look at"},
	}
	text := texts[code]
	return func(r *Readings) (found []Problem) {
		if r.Agent.Capture == nil {
			return nil
		}
		for _, way := range r.Agent.Capture.Elsewise {
			if way.State != text.Subject {
				continue
			}
			p := text
			p.Subject, p.What, p.Evidence, p.Rows = way.Nameserver.String(), fmt.Sprintf(text.What, way.Nameserver), way.Detail, []string{"K19"}
			found = append(found, p)
		}
		return found
	}
}

func captureEnded(r *Readings) []Problem {
	c := r.Agent.Capture
	if c == nil || !c.On {
		return nil
	}
	if c.Active { // of the other family at least
		return ways(CaptureEnded)(r)
	}
	return []Problem{{
		Severity: Severe, What: "the rules capture nothing now", Evidence: "the kernel has ended the capture, or no rules are installed",
		Effect: "queries go to the nameservers, which do not know mesh names", Mend: "nametap capture status", Rows: []string{"K9", "K17"},
	}}
}
