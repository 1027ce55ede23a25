package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/nametap/nametap/agent"
	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/internal/condition"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
)

// The codes of what only doctor looks at.
const (
	settingsWrong      condition.Code = "settings_wrong"
	socketMissing      condition.Code = "socket_missing"
	nsswitchDNS        condition.Code = "nsswitch_dns"
	queriesGoElsewhere condition.Code = "queries_go_elsewhere"
)

// A host is what doctor examines besides the agent. status is empty if err, the error of asking the agent, is not nil.
type host struct {
	*doctorCommand
	status agent.Status
	err    error
	wrong  error // why the settings of this command are wrong
}

// processConditions returns the conditions of the agent's process and of its settings.
func (h *host) processConditions(ctx context.Context) []condition.Condition {
	wrong := condition.Condition{Code: settingsWrong, Title: "the settings can be read"}
	absent := condition.Condition{Code: condition.AgentAbsent, Title: "an agent runs", Causes: []condition.Code{settingsWrong}}
	socket := condition.Condition{Code: socketMissing, Title: "commands can ask the agent", Causes: []condition.Code{settingsWrong, condition.AgentAbsent}}
	other := condition.Condition{Code: "agent_version", Title: "the agent has the version of this command", Causes: []condition.Code{settingsWrong, condition.AgentAbsent, socketMissing}}
	unit := unitSettings{}
	if os.Getenv(inPod) == "" {
		unit = readUnit(ctx)
	}
	next, invalid := unit.options()
	p := condition.Problem{Severity: condition.Severe, Effect: "an agent with this setting does not start: no mesh name resolves", Rows: []string{"R7"}}
	switch missing := new(noSocketError); {
	case h.wrong != nil:
		p.What, p.Evidence, p.Mend = "a setting of this command cannot be used", h.wrong.Error(), "correct that setting"
		wrong.Problems = []condition.Problem{p}
	case errors.As(h.err, missing):
		socket.Problems = []condition.Problem{missing.problem()}
	case h.err != nil && invalid != nil:
		p.What, p.Evidence, p.Mend = unit.name()+" cannot be used", invalid.Error(), "correct that setting, then systemctl restart nametap"
		wrong.Problems = []condition.Problem{p}
	case h.err != nil:
		absent.Problems = []condition.Problem{h.absent(ctx)}
	}
	if running := strings.TrimPrefix(h.status.Version, "nametap "); running != "" && running != version.String() {
		other.Problems = []condition.Problem{{
			Severity: condition.Minor, What: "the running agent has another version than this command",
			Evidence: "the agent is nametap " + running + ", the command nametap " + version.String(),
			Effect:   "the agent lacks the changes of the installed version", Mend: "systemctl restart nametap", Rows: []string{"V2"},
		}}
	}
	return []condition.Condition{wrong, absent, socket, other, unit.condition(next, invalid)}
}

// condition returns the condition of next, the settings that the agent would have after a restart. invalid says why they
// are wrong.
func (u unitSettings) condition(next *options, invalid error) condition.Condition {
	c := condition.Condition{
		Code: "unit_settings", Title: "the agent has the settings of its unit", Causes: []condition.Code{settingsWrong, condition.AgentAbsent},
	}
	running, err := u.running()
	switch {
	case u.pid == 0:
		c.Unknown = "systemd does not run the agent"
	case err != nil:
		c.Unknown = "only root may read the environment of the agent: " + err.Error()
	case invalid != nil:
		c.Problems = []condition.Problem{{
			Severity: condition.Severe, What: u.name() + " cannot be used", Evidence: invalid.Error(),
			Effect: "none until the agent ends; then it does not start again", Mend: "correct that setting, then systemctl restart nametap", Rows: []string{"R7"},
		}}
	default:
		var names []string
		for _, change := range changes(running, next) {
			names = append(names, fmt.Sprintf("--%s (%s=%s)", change.name, settings.Env(next.flags.Lookup(change.name)), change.to))
		}
		if len(names) > 0 {
			c.Problems = []condition.Problem{pendingProblem(names, u.name()+" has another value than the running agent")}
		}
	}
	return c
}

// absent returns the problem that no agent answers.
func (h *host) absent(ctx context.Context) condition.Problem {
	p := condition.Problem{
		Severity: condition.Severe, What: "no agent answers on this host", Evidence: h.err.Error(),
		Effect: "no mesh name resolves", Mend: "start it: systemctl restart nametap", Rows: []string{"V2"},
	}
	if state := unitState(ctx); state != "" {
		p.Evidence += "; nametap.service is " + state
		p.Mend = "journalctl -u nametap says why it does not run; then systemctl restart nametap"
	}
	taken := programsAt(h.doctorCommand.status.options.agent.DNS.Addr)
	if len(taken) > 0 {
		program := cmp.Or(taken[0].Program, "another program")
		p.What += ", and " + program + " has its port"
		p.Mend = "end " + program + ", or set another --dns-addr; then systemctl restart nametap"
	}
	for _, t := range taken {
		p.Evidence += "; " + cmp.Or(t.Program, "a program") + " listens at " + t.Address
	}
	return p
}

// maxServers is how many nameservers libc uses (MAXNS).
const maxServers = 3

// fileConditions returns the conditions of resolv.conf and nsswitch.conf, and the nameservers of resolv.conf.
func (h *host) fileConditions() ([]condition.Condition, []netip.AddrPort) {
	path := h.resolvConf()
	text, err := os.ReadFile(path)
	unread := condition.Condition{Code: condition.ResolvConfUnread, Title: "resolv.conf can be read"}
	empty := condition.Condition{Code: condition.ResolvConfEmpty, Title: "resolv.conf names a nameserver", Causes: []condition.Code{unread.Code}}
	many := condition.Condition{Code: "resolv_conf_servers", Title: "resolv.conf names at most three nameservers", Causes: []condition.Code{unread.Code}}
	servers := resolvconf.Parse(text).Servers
	switch {
	case err != nil:
		evidence := err.Error()
		if target, linkErr := os.Readlink(path); linkErr == nil && errors.Is(err, fs.ErrNotExist) {
			evidence = "it is a link to " + target + ", which does not exist"
		}
		unread.Problems = []condition.Problem{{
			Severity: condition.Severe, What: path + " cannot be read", Evidence: evidence,
			Effect: "programs query 127.0.0.1, and the agent keeps the nameservers that it knew", Mend: "restore " + path, Rows: []string{"F5"},
		}}
	case len(servers) == 0:
		empty.Problems = []condition.Problem{{
			Severity: condition.Severe, What: path + " names no nameserver", Evidence: "it has no line such as \"nameserver 192.0.2.53\" that can be used",
			Effect: "programs query 127.0.0.1, and the agent has no nameserver without --upstream", Mend: "name a nameserver in " + path, Rows: []string{"F7"},
		}}
	case len(servers) > maxServers:
		many.Problems = []condition.Problem{{
			Severity: condition.Minor, What: fmt.Sprintf("%s names %d nameservers, but programs use only three", path, len(servers)),
			Evidence: fmt.Sprintf("after the third: %v", servers[maxServers:]), Effect: "the agent queries them, programs without the agent do not",
			Mend: "take them out of " + path, Rows: []string{"F5"},
		}}
	}
	return append([]condition.Condition{unread, empty, many}, h.nsswitch()...), servers
}

// nsswitchConf says which services libc uses to look up names.
const nsswitchConf = "/etc/nsswitch.conf"

// nsswitch returns the conditions of nsswitch.conf.
func (h *host) nsswitch() []condition.Condition {
	dns := condition.Condition{Code: nsswitchDNS, Title: "nsswitch.conf has dns"}
	mdns := condition.Condition{Code: "nsswitch_mdns", Title: "nsswitch.conf does not hide the cluster domain", Causes: []condition.Code{nsswitchDNS}}
	hosts := hostsServices()
	if hosts == nil {
		dns.Unknown = "nsswitch.conf has no line hosts:, so libc uses dns and files"
		mdns.Unknown = dns.Unknown
		return []condition.Condition{dns, mdns}
	}
	byDNS := func(service string) bool { return service == "dns" || service == "resolve" }
	line := "hosts: " + strings.Join(hosts, " ")
	if !slices.ContainsFunc(hosts, byDNS) {
		dns.Problems = []condition.Problem{{
			Severity: condition.Severe, What: nsswitchConf + " has no dns for hosts", Evidence: line,
			Effect: "programs that use libc find no name by DNS", Mend: "add dns to the line hosts: of " + nsswitchConf, Rows: []string{"K1"},
		}}
	}
	_, noAvahi := os.Stat("/run/avahi-daemon/socket")
	i := slices.IndexFunc(hosts, func(service string) bool { return strings.HasPrefix(service, "mdns") })
	domain := strings.ToLower(strings.Trim(h.doctorCommand.status.options.agent.DNS.Domain, "."))
	if i >= 0 && i+1 < len(hosts) && strings.EqualFold(hosts[i+1], "[NOTFOUND=return]") && !slices.ContainsFunc(hosts[:i], byDNS) &&
		noAvahi == nil && (domain == "local" || strings.HasSuffix(domain, ".local")) {
		mdns.Problems = []condition.Problem{{
			Severity: condition.Minor, What: nsswitchConf + " asks mDNS for names below .local, and then no other service",
			Evidence: line + "; avahi-daemon runs", Rows: []string{"V5"},
			Effect: "programs that use libc do not find names such as db.local; with nss-mdns before 0.11, none below " + domain,
			Mend:   "take [NOTFOUND=return] out of the line hosts: of " + nsswitchConf,
		}}
	}
	return []condition.Condition{dns, mdns}
}

// hostsServices returns the services of the line "hosts" of nsswitch.conf; nil without that line.
func hostsServices() []string {
	text, err := os.ReadFile(nsswitchConf)
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		if services, found := strings.CutPrefix(strings.TrimSpace(line), "hosts:"); found {
			return strings.Fields(services)
		}
	}
	return nil
}

// wayConditions returns the conditions of a query's way from a program to the agent. servers are the nameservers of
// resolv.conf.
func (h *host) wayConditions(ctx context.Context, servers []netip.AddrPort) []condition.Condition {
	causes := []condition.Code{
		settingsWrong, condition.AgentAbsent, socketMissing, condition.ResolvConfUnread, condition.ResolvConfEmpty, condition.ConntrackFull, condition.ListenerSilent,
		condition.CaptureAbsent, condition.CaptureRepaired, condition.CaptureBarred, condition.CaptureBroken, condition.CaptureEnded,
	}
	elsewhere := condition.Condition{Code: queriesGoElsewhere, Title: "the agent answers the queries of programs", Causes: causes}
	unanswered := condition.Condition{Code: "queries_go_unanswered", Title: "queries of programs are answered", Causes: append(causes, queriesGoElsewhere)}
	var sent []probe.Result
	switch {
	case h.err != nil || len(servers) == 0:
	case len(h.status.Redirected) > 0 && os.Getenv(inPod) != "":
		elsewhere.Problems, elsewhere.Unknown = h.unredirected()
		unanswered.Unknown = cmp.Or(elsewhere.Unknown, "in a pod, doctor cannot send queries as another user")
	default:
		sent, elsewhere.Unknown = h.ways(ctx, servers[0])
		unanswered.Unknown = elsewhere.Unknown
	}
	for _, s := range sent {
		p := condition.Problem{Severity: condition.Severe, Subject: s.To + "/" + s.Network, Rows: []string{"K1"}}
		switch {
		case s.State == probe.Other:
			p.What = fmt.Sprintf("another server answers the queries of programs to %s over %s", s.To, s.Network)
			p.Evidence = strings.Join(append([]string{"its answer to agent.nametap is not that of the agent"}, h.otherRules()...), "; ")
			p.Effect, p.Mend = "programs do not find mesh names", "nft list ruleset and iptables-legacy-save show the rules of all programs: take out the one for port 53"
			elsewhere.Problems = append(elsewhere.Problems, p)
		case !s.Answered():
			p.What = fmt.Sprintf("queries of programs to %s over %s have no answer", s.To, s.Network)
			p.Evidence, p.Effect, p.Mend = s.Error, "programs find no name, or wait", "nametap capture check"
			unanswered.Problems = append(unanswered.Problems, p)
		}
	}
	return []condition.Condition{elsewhere, unanswered}
}

// otherRules returns rules of other programs that also redirect queries.
func (h *host) otherRules() (others []string) {
	if capture := h.status.Capture; capture != nil && capture.Rules != nil {
		for _, f := range capture.Rules.Families {
			others = append(others, f.Others...)
		}
	}
	return others
}

// unredirected returns a problem for each family whose queries are not redirected to the agent of this pod, as the
// agent's test queries show. unknown says why this is not known.
func (h *host) unredirected() (found []condition.Problem, unknown string) {
	capture, err := h.doctorCommand.status.options.captureConfig()
	switch {
	case err != nil:
		return nil, "the settings of capture are wrong: " + err.Error()
	case !capture.On:
		return nil, "capture is off: " + capture.Because
	}
	for _, r := range h.status.Redirected {
		if f := r.Family(); notRedirected(r) && capture.Config.Has(f) {
			found = append(found, condition.Problem{
				Severity: condition.Severe, Subject: f.String(), What: fmt.Sprintf("queries of this pod over %s are not redirected to the agent", f),
				Evidence: fmt.Sprintf("%s a test query to %s", r.State, r.To), Effect: "programs do not find mesh names",
				Mend: "kubectl logs POD -c nametap-capture says why it has not installed the rules", Rows: []string{"I0", "K11"},
			})
		}
	}
	return found, ""
}

// ways sends queries to a nameserver of resolv.conf, as programs do. unknown says why it sends none.
func (h *host) ways(ctx context.Context, server netip.AddrPort) (sent []probe.Result, unknown string) {
	own := h.status.OnlyNameserverOf != ""
	switch capture := h.status.Capture; {
	case capture != nil && !capture.On:
		return nil, "capture is off: " + capture.Because
	case capture == nil && !own:
		return nil, "this agent captures no queries: programs that do not query it directly do not reach it"
	case os.Geteuid() != 0 && !own:
		return nil, "only root may send queries as another user"
	}
	if excluded := h.excluded(ctx); excluded != "" {
		return nil, "the settings may exclude this query from capture: " + excluded
	}
	direct := probe.Listeners(ctx, h.status.DNS...)
	i := slices.IndexFunc(direct, func(r probe.Result) bool { return r.State == probe.Agent })
	if i < 0 {
		return nil, "the agent does not say who it is: " + strings.Join(probe.Errors(direct), "; ")
	}
	q := probe.Query{Network: "udp", To: server.String(), ID: direct[i].ID, As: probe.Nobody, Limit: 2 * probe.Timeout}
	overTCP := q
	overTCP.Network = "tcp"
	return probe.All(ctx, q, overTCP), ""
}

// excluded returns a setting that may keep the agent from capturing the queries that doctor sends. It returns "" if
// there is no such setting.
func (h *host) excluded(ctx context.Context) string {
	settings, err := askSettings(ctx, h.doctorCommand.status)
	if err != nil {
		return ""
	}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		byUser := name == "capture-exclude-uid" || name == "capture-exclude-gid"
		if strings.HasPrefix(name, "capture-exclude-") &&
			(!byUser || slices.Contains(settings[name], strconv.Itoa(probe.Nobody))) {
			return "--" + name
		}
	}
	return ""
}
