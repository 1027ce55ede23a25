package problems

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// maxServers is how many nameservers libc uses (MAXNS).
const maxServers = 3

// hostChecks returns the checks of the host, which only `nametap doctor` makes, not the agent.
func hostChecks() []check {
	return []check{
		{host: true, code: SettingsWrong, title: "the settings can be read", find: settingsWrong},
		{host: true, code: AgentAbsent, title: "an agent runs", grounds: []Code{SettingsWrong}, find: agentAbsent},
		{host: true, code: AgentVersion, title: "the agent has the version of this command", grounds: []Code{SettingsWrong, AgentAbsent}, find: agentVersion},
		{host: true, code: ResolvConfUnread, title: "resolv.conf can be read", find: resolvConfUnread},
		{host: true, code: ResolvConfEmpty, title: "resolv.conf names a nameserver", grounds: []Code{ResolvConfUnread}, find: resolvConfEmpty},
		{host: true, code: ResolvConfMany, title: "resolv.conf names at most three nameservers", grounds: []Code{ResolvConfUnread}, find: resolvConfMany},
		{host: true, code: NsswitchNoDNS, title: "nsswitch.conf has dns", find: nsswitchDNS},
		{host: true, code: NsswitchMDNS, title: "nsswitch.conf does not hide the cluster domain", grounds: []Code{NsswitchNoDNS}, find: nsswitchMDNS},
	}
}

// wayChecks returns the checks of a query's way from a program to the agent, which only `nametap doctor` makes.
func wayChecks() []check {
	grounds := []Code{
		SettingsWrong, AgentAbsent, ResolvConfUnread, ResolvConfEmpty, ConntrackFull, ListenerSilent, CaptureAbsent, CaptureRepaired, CaptureBarred, CaptureBroken, CaptureEnded,
	}
	return []check{
		{host: true, code: QueriesGoElsewhere, title: "the agent answers the queries of programs", grounds: grounds, find: queriesGoElsewhere},
		{host: true, code: QueriesGoUnanswered, title: "queries of programs are answered", grounds: append(grounds, QueriesGoElsewhere), find: queriesGoUnanswered},
	}
}

func settingsWrong(r *Readings) []Problem {
	if r.Host.Settings == "" {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: r.Host.SettingsOf + " cannot be used", Evidence: r.Host.Settings,
		Effect: "an agent with this setting does not start: no mesh name resolves", Mend: "correct that setting, then systemctl restart nametap", Rows: []string{"R7"},
	}}
}

func agentVersion(r *Readings) []Problem {
	if r.Host.Running == "" || r.Host.Running == r.Host.Version {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: "the running agent has another version than this command", Evidence: "the agent is nametap " + r.Host.Running + ", the command nametap " + r.Host.Version,
		Effect: "the agent lacks the changes of the installed version", Mend: "systemctl restart nametap", Rows: []string{"V2"},
	}}
}

func agentAbsent(r *Readings) []Problem {
	if r.Host.Absent == "" {
		return nil
	}
	what, mend, evidence := "no agent answers on this host", "start it: systemctl restart nametap", r.Host.Absent
	if r.Host.Unit != "" {
		evidence += "; nametap.service is " + r.Host.Unit
		mend = "journalctl -u nametap says why it does not run; then systemctl restart nametap"
	}
	if len(r.Host.Taken) > 0 {
		program := cmp.Or(r.Host.Taken[0].Program, "another program")
		what = fmt.Sprintf("no agent answers on this host, and %s has its port", program)
		mend = "end " + program + ", or set another --dns-addr; then systemctl restart nametap"
		texts := []string{evidence}
		for _, taken := range r.Host.Taken {
			texts = append(texts, cmp.Or(taken.Program, "a program")+" listens at "+taken.Address)
		}
		evidence = strings.Join(texts, "; ")
	}
	return []Problem{{
		Severity: Severe, What: what, Evidence: evidence,
		Effect: "no mesh name resolves", Mend: mend, Rows: []string{"V2"},
	}}
}

func resolvConfUnread(r *Readings) []Problem {
	if r.Host.Unread == "" {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: r.Host.ResolvConf + " cannot be read", Evidence: r.Host.Unread,
		Effect: "programs query 127.0.0.1, and the agent keeps the nameservers that it knew", Mend: "restore " + r.Host.ResolvConf, Rows: []string{"F5"},
	}}
}

func resolvConfEmpty(r *Readings) []Problem {
	if r.Host.Unread != "" || len(r.Host.Servers) > 0 {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: r.Host.ResolvConf + " names no nameserver", Evidence: "it has no line such as \"nameserver 192.0.2.53\" that can be used",
		Effect: "programs query 127.0.0.1, and the agent has no nameserver without --upstream", Mend: "name a nameserver in " + r.Host.ResolvConf, Rows: []string{"F7"},
	}}
}

func resolvConfMany(r *Readings) []Problem {
	if len(r.Host.Servers) <= maxServers {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: fmt.Sprintf("%s names %d nameservers, but programs use only three", r.Host.ResolvConf, len(r.Host.Servers)),
		Evidence: "after the third: " + strings.Join(r.Host.Servers[maxServers:], ", "),
		Effect:   "the agent queries them, programs without the agent do not", Mend: "take them out of " + r.Host.ResolvConf, Rows: []string{"F5"},
	}}
}

func nsswitchDNS(r *Readings) []Problem {
	hosts := r.Host.Hosts
	if hosts == nil || slices.Contains(hosts, "dns") || slices.Contains(hosts, "resolve") {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: "/etc/nsswitch.conf has no dns for hosts", Evidence: "hosts: " + strings.Join(hosts, " "),
		Effect: "programs that use libc find no name by DNS", Mend: "add dns to the line hosts: of /etc/nsswitch.conf", Rows: []string{"K1"},
	}}
}

func nsswitchMDNS(r *Readings) []Problem {
	hosts := r.Host.Hosts
	i := slices.IndexFunc(hosts, func(service string) bool { return strings.HasPrefix(service, "mdns") })
	if i < 0 || i+1 >= len(hosts) || !strings.EqualFold(hosts[i+1], "[NOTFOUND=return]") {
		return nil
	}
	earlier := slices.ContainsFunc(hosts[:i], func(service string) bool { return service == "dns" || service == "resolve" })
	if earlier || !r.Host.MDNS || !isBelow(r.Host.Domain, "local") {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: "/etc/nsswitch.conf asks mDNS for names below .local, and then no other service",
		Evidence: "hosts: " + strings.Join(hosts, " ") + "; avahi-daemon runs",
		Effect:   "programs that use libc do not find names such as db.local; with nss-mdns before 0.11, none below " + r.Host.Domain,
		Mend:     "take [NOTFOUND=return] out of the line hosts: of /etc/nsswitch.conf", Rows: []string{"V5"},
	}}
}

func queriesGoElsewhere(r *Readings) (found []Problem) {
	for _, family := range slices.Sorted(maps.Keys(r.Host.Unredirected)) {
		found = append(found, Problem{
			Severity: Severe, Subject: family, What: "queries of this pod over " + family + " are not redirected to the agent",
			Evidence: r.Host.Unredirected[family], Effect: "programs do not find mesh names",
			Mend: "kubectl logs POD -c nametap-capture says why it has not installed the rules", Rows: []string{"I0", "K11"},
		})
	}
	return append(found, sent(r, func(s Probe) bool { return s.State == ProbeOther }, func(s Probe) Problem {
		evidence := "the answer to id.server is not that of the agent"
		if len(r.Host.Others) > 0 {
			evidence += "; " + strings.Join(r.Host.Others, "; ")
		}
		return Problem{
			What:     fmt.Sprintf("another server answers the queries of programs to %s over %s", s.To, s.Network),
			Evidence: evidence,
			Effect:   "programs do not find mesh names", Mend: "nft list ruleset and iptables-legacy-save show the rules of all programs: take out the one for port 53",
		}
	})...)
}

func queriesGoUnanswered(r *Readings) []Problem {
	return sent(r, func(s Probe) bool { return !s.Answered() }, func(s Probe) Problem {
		return Problem{
			What:     fmt.Sprintf("queries of programs to %s over %s have no answer", s.To, s.Network),
			Evidence: s.Error, Effect: "programs find no name, or wait", Mend: "nametap capture check",
		}
	})
}

// sent returns a problem for each query for which match returns true.
func sent(r *Readings, match func(Probe) bool, problem func(Probe) Problem) (found []Problem) {
	for _, s := range r.Host.Ways {
		if match(s) {
			p := problem(s)
			p.Severity, p.Subject, p.Rows = Severe, s.To+"/"+s.Network, []string{"K1"}
			found = append(found, p)
		}
	}
	return found
}
