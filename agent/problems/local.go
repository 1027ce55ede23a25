package problems

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// localChecks returns the checks of the agent's settings, addresses and state directory.
func localChecks() []check {
	return []check{
		{code: SettingsRefused, title: "the settings in the files are in use", find: settingsRefused},
		{code: SettingsPending, title: "no setting waits for a restart", grounds: []Code{SettingsRefused}, find: settingsPending},
		{code: AddressTaken, title: "all addresses of the agent are open", find: addressTaken},
		{code: ListenerMissing, title: "all DNS listeners are open", find: listenerMissing},
		{code: ListenerSilent, title: "all DNS listeners answer", grounds: []Code{ConntrackFull, Descriptors}, find: listenerSilent},
		{code: StateDir, title: "the table is saved in the state directory", find: stateDir},
	}
}

// captureChecks returns the checks of capture.
func captureChecks() []check {
	listeners := []Code{ConntrackFull, ListenerSilent}
	changed := append(slices.Clone(listeners), CaptureRepaired)
	return []check{
		{code: CaptureSecond, title: "no other agent captures here", find: captureSecond},
		{code: CaptureAbsent, title: "the capture rules are in place", find: captureAbsent},
		{code: CaptureRepaired, title: "no other program changes the capture rules", grounds: []Code{CaptureAbsent}, find: captureRepaired},
		{code: CaptureRemains, title: "rules that are not wanted are removed", find: captureRemains},
		{code: CaptureBroken, title: "captured queries reach the agent", grounds: changed, find: ways(WayBroken)},
		{code: CaptureElsewhere, title: "no other rules redirect queries", grounds: changed, find: ways(WayElsewhere)},
		{code: CaptureEnded, title: "the rules capture", grounds: append(listeners, CaptureAbsent, CaptureBarred, CaptureBroken), find: captureEnded},
		{code: CaptureInterrupted, title: "nothing interrupts the capture", grounds: []Code{CaptureAbsent, CaptureEnded}, find: captureInterrupted},
	}
}

func settingsRefused(r *Readings) []Problem {
	if r.Agent.Settings.Refused == "" {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: "the settings files have changed, and cannot be used", Evidence: r.Agent.Settings.Refused,
		Effect: "the agent uses the previous settings, and would not start again with these", Mend: "correct that setting; nothing needs a restart", Rows: []string{"R10"},
	}}
}

func settingsPending(r *Readings) []Problem {
	names := r.Agent.Settings.Pending
	if len(names) == 0 {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: "settings have changed that take effect after a restart: " + strings.Join(names, ", "),
		Evidence: "the files with settings have other values than the agent had at its start", Effect: "the agent uses the previous values",
		Mend: "systemctl restart nametap; in a pod, replace the pod", Rows: []string{"R10"},
	}}
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
			Severity: Minor, Subject: text, What: "a DNS listener cannot be opened; retrying: " + listener(text),
			Evidence: text, Effect: "queries of this family and protocol are not answered by the agent",
			Mend: "ss -lnutp shows which program has the port: end it, or set --dns-addr", Rows: []string{"R3"},
		})
	}
	return found
}

// listener returns the network and the address in text, an error of package net such as "listen udp [::1]:15053:
// bind: …".
func listener(text string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(text, "listen "), ": ")
	return name
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
	const retryText = "; the agent tries again at the next push, and after 30 min at most"
	mend := "let the agent's user write to " + r.Agent.StateDir + ", or set --state-dir" + retryText
	if strings.Contains(r.Agent.XDS.SnapshotError, "no space left") {
		mend = "df " + r.Agent.StateDir + "; make room on that file system, or set --state-dir" + retryText
	}
	return []Problem{{
		Severity: Minor, What: "the table cannot be saved in " + r.Agent.StateDir, Evidence: r.Agent.XDS.SnapshotError,
		Effect: "after a restart without the control plane no mesh name resolves", Mend: mend, Rows: []string{"C7"},
	}}
}

func captureSecond(r *Readings) (found []Problem) {
	capture := r.Agent.capture()
	p := Problem{
		Severity: Minor, What: "another agent wants to capture DNS in this network namespace", Effect: "it captures nothing while this agent runs",
		Mend: "end one of the two agents; the other one then captures", Rows: []string{"K23"},
	}
	if capture.Waits {
		p.Severity, p.What, p.Effect = Severe, "another agent captures DNS in this network namespace", "this agent captures nothing while that one runs"
	}
	for _, other := range capture.Others {
		p.Subject, p.Evidence = other, other
		found = append(found, p)
	}
	return found
}

func captureAbsent(r *Readings) (found []Problem) {
	failed := r.Agent.capture().Failed
	for _, family := range slices.Sorted(maps.Keys(failed)) {
		found = append(found, Problem{
			Severity: Severe, Subject: family, What: "the rules for " + family + " cannot be installed; retrying",
			Evidence: failed[family], Effect: "queries over " + family + " go to the nameservers, which do not know mesh names",
			Mend: "nametap capture check", Rows: []string{"K9", "K10"},
		})
	}
	return found
}

// RepairsIn is how far back a reading that found repaired capture rules still counts.
const RepairsIn = 3 * time.Minute

const (
	// captureRepaired finds a problem if at least four readings (the constant repairs) within the time RepairsIn found
	// that rules had been repaired since the reading before. Loading a firewall changes the rules several times, so the
	// first and the last of these readings must be at least repairsApart apart. The last of them may be at most
	// repairsLast ago.
	repairs      = 4
	repairsApart = 20 * time.Second
	repairsLast  = 20 * time.Second
)

func captureRepaired(r *Readings) []Problem {
	capture := r.Agent.capture()
	times := slices.DeleteFunc(slices.Clone(capture.Repaired), func(at time.Time) bool { return r.Now.Sub(at) > RepairsIn })
	if len(times) < repairs {
		return nil
	}
	first, last := times[0], times[len(times)-1]
	if last.Sub(first) < repairsApart || r.Now.Sub(last) > repairsLast {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: "another program removes or changes the capture rules again and again",
		Evidence: fmt.Sprintf("%d repairs since the start, the last one up to %v ago: %s", capture.Repairs, r.Now.Sub(last).Round(time.Second)+time.Second, capture.Drift),
		Effect:   "until each repair, queries go to the nameservers, which do not know mesh names",
		Mend:     "nft monitor shows what changes rules; make that program keep the chains NAMETAP_*", Rows: []string{"K10"},
	}}
}

func captureRemains(r *Readings) []Problem {
	remains := r.Agent.capture().Remains
	if remains == "" {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: "capture rules cannot be removed; retrying", Evidence: remains,
		Effect: "queries are captured although the settings say that they should not be", Mend: "nametap capture remove", Rows: []string{"K10"},
	}}
}

// ways returns the find function of a check that finds a problem for each way in the given state.
func ways(state WayState) func(*Readings) []Problem {
	text := map[WayState]Problem{
		WayBarred: {Severity: Severe, What: "a firewall of this host drops the queries that the agent forwards to %s",
			Effect: "queries go to the nameserver itself, which does not know mesh names", Mend: "allow DNS for the agent's user in that firewall"},
		WayBroken: {Severity: Severe, What: "queries of programs to %s do not reach the agent, although it answers",
			Effect: "they go to the nameserver itself, which does not know mesh names", Mend: "nametap capture check lists the firewall rules to look at"},
		WayElsewhere: {Severity: Minor, What: "nametap cannot check whether queries of programs to %s reach the agent",
			Effect: "queries may go to another server, which does not know mesh names", Mend: "nametap capture check lists the rules of other programs"},
		WaySilent: {Severity: Severe, What: "the agent does not answer queries of programs to %s, nor its own probes",
			Effect: "without an answer the kernel ends the capture: they go to the nameserver itself, which does not know mesh names", Mend: "nametap capture check lists the firewall rules to look at"},
	}[state]
	return func(r *Readings) (found []Problem) {
		for _, way := range r.Agent.capture().Ways {
			if way.State != state {
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
	capture := r.Agent.capture()
	if !capture.On {
		return nil
	}
	if capture.Active { // the rules of at least one family capture
		return ways(WaySilent)(r)
	}
	p := Problem{
		Severity: Severe, What: "the rules capture nothing now", Evidence: "the kernel has ended the capture, or no rules are installed",
		Effect: "queries go to the nameservers, which do not know mesh names", Mend: "nametap capture status", Rows: []string{"K9", "K17"},
	}
	for _, lapse := range capture.Lapses {
		if r.Now.Sub(lapse.Last) <= RepairsIn {
			p.Evidence, p.Mend = lapse.Cause.parts()
		}
	}
	return []Problem{p}
}

// captureInterrupted finds a problem for each cause of interruptions in the last [RepairsIn].
func captureInterrupted(r *Readings) (found []Problem) {
	for _, lapse := range r.Agent.capture().Lapses {
		ago := r.Now.Sub(lapse.Last)
		if ago > RepairsIn {
			continue
		}
		cause, look := lapse.Cause.parts()
		found = append(found, Problem{
			Severity: Minor, Subject: cause, What: "the capture was interrupted: " + cause,
			Evidence: fmt.Sprintf("%d times since the start, last %v ago", lapse.Count, ago.Round(time.Second)),
			Effect:   "meanwhile queries go to the nameservers, which do not know mesh names", Mend: look, Rows: []string{"V2"},
		})
	}
	return found
}
