package problems

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// clockTolerance is how far the clock of this host may be behind without being a problem.
const clockTolerance = time.Minute

// controlChecks returns the checks of the control plane.
func controlChecks() []check {
	before := []Code{ConntrackFull, ClockBehind, ControlFile, TokenExpired}
	unconnected := append(slices.Clone(before), ControlUnresolved, ControlRefuses, ControlUnreachable)
	return []check{
		{code: ClockBehind, title: "the clock is not behind that of the cluster", find: clockBehind},
		{code: ControlFile, title: "the files for the control plane can be read", find: controlFile},
		{code: TokenExpired, title: "the token has not expired", find: tokenExpired},
		{code: TokenExpires, title: "the token is renewed in time", grounds: []Code{TokenExpired}, find: tokenExpires},
		{code: Certificate, title: "the workload certificate is renewed", grounds: unconnected, find: certificate},
		{code: ControlUnresolved, title: "the name of the control plane resolves", grounds: append(unanswered(), before...), find: controlUnresolved},
		{code: ControlRefuses, title: "the control plane accepts the agent", grounds: before, find: controlRefuses},
		{code: ControlUnreachable, title: "the control plane is connected", grounds: append(slices.Clone(before), ListenerSilent), find: controlUnreachable},
		{code: PushRejected, title: "the last push is in use", grounds: unconnected, find: pushRejected},
		{code: TableAbsent, title: "there is a table of mesh names", grounds: append(unconnected, PushRejected), find: tableAbsent},
		{code: TableStale, title: "the control plane has confirmed the table", grounds: append(unconnected, PushRejected), find: tableStale},
	}
}

// withoutControl returns the effect of a missing connection to the control plane, and its severity.
func withoutControl(a *Agent) (Severity, string) {
	switch {
	case a.XDS.Connected && a.XDS.Loaded:
		return Minor, "none until the connection ends"
	case !a.XDS.Loaded:
		return Severe, "no mesh name resolves: there is no table"
	case a.XDS.Stale:
		return Severe, fmt.Sprintf("mesh names are answered from the snapshot, %v old: hosts that are new since then do not resolve", age(a.XDS.TableAge))
	}
	return Minor, "mesh names are answered from the current table; changes of hosts do not arrive"
}

// age returns seconds as a duration, rounded to seconds.
func age(seconds float64) time.Duration {
	return (time.Duration(seconds) * time.Second).Round(time.Second)
}

func clockBehind(r *Readings) []Problem {
	token := r.Agent.Token
	behind := token.Issued.Sub(r.Now)
	if token.Issued.IsZero() || behind <= clockTolerance {
		return nil
	}
	severity, effect := withoutControl(r.Agent)
	return []Problem{{
		Severity: severity, What: fmt.Sprintf("the clock of this host is at least %v behind that of the cluster", behind.Round(time.Second)),
		Evidence: fmt.Sprintf("the token in %s was issued at %s", token.File, token.Issued.UTC().Format(time.RFC3339)),
		Effect:   effect, Mend: "timedatectl set-ntp true", Rows: []string{"V7"},
	}}
}

func tokenExpired(r *Readings) []Problem {
	token := r.Agent.Token
	if !r.Agent.needsToken(r.Now) || token.Expires.IsZero() || token.Expires.After(r.Now) {
		return nil
	}
	severity, effect := withoutControl(r.Agent)
	return []Problem{{
		Severity: severity, What: "the token for the control plane has expired",
		Evidence: fmt.Sprintf("the token in %s expired at %s, and there is no workload certificate; %s", token.File, token.Expires.UTC().Format(time.RFC3339), lastError(r)),
		Effect:   effect, Mend: "put a new token at " + token.File + "; nothing needs a restart", Rows: []string{"C1"},
	}}
}

func tokenExpires(r *Readings) []Problem {
	token := r.Agent.Token
	if !r.Agent.needsToken(r.Now) || token.Expires.IsZero() || token.Issued.IsZero() {
		return nil
	}
	// kubelet replaces a token at four fifths of its life.
	left, life := token.Expires.Sub(r.Now), token.Expires.Sub(token.Issued)
	if left <= 0 || left > life/10 {
		return nil
	}
	return []Problem{{
		Severity: Minor, What: fmt.Sprintf("the token for the control plane expires in %v, and nothing has replaced it", left.Round(time.Second)),
		Evidence: fmt.Sprintf("the token in %s expires at %s, and there is no workload certificate", token.File, token.Expires.UTC().Format(time.RFC3339)),
		Effect:   "none until the token expires; then the control plane refuses the agent", Mend: "put a new token at " + token.File, Rows: []string{"C1"},
	}}
}

func certificate(r *Readings) []Problem {
	xds := r.Agent.XDS
	if xds.CertificateError == "" {
		return nil
	}
	effect := "none while the token is accepted"
	if !xds.CertificateExpires.IsZero() {
		effect = "none until the certificate expires at " + xds.CertificateExpires.UTC().Format(time.RFC3339)
	}
	return []Problem{{
		Severity: Minor, What: "the workload certificate cannot be obtained or renewed",
		Evidence: xds.CertificateError, Effect: effect,
		Mend: "check --ca-addr, or disable the exchange with --workload-cert off", Rows: []string{"C1"},
	}}
}

func controlFile(r *Readings) []Problem {
	file, why := r.Agent.unread()
	if file == "" {
		return nil
	}
	severity, effect := withoutControl(r.Agent)
	mend := "put that file in place; nothing needs a restart"
	if strings.HasSuffix(why, "permission denied") {
		mend = "let the user of the agent read that file; nothing needs a restart"
	}
	return []Problem{{
		Severity: severity, What: "the agent cannot read " + file, Evidence: why, Effect: effect, Mend: mend, Rows: []string{"C1"},
	}}
}

func controlUnresolved(r *Readings) []Problem {
	if r.Agent.connected() || !r.Agent.unresolved() {
		return nil
	}
	severity, effect := withoutControl(r.Agent)
	return []Problem{{
		Severity: severity, What: fmt.Sprintf("the name of the control plane %s does not resolve", r.Agent.XDS.Address),
		Evidence: lastError(r), Effect: effect, Mend: "set --xds-addr to a name that the nameservers of this host know, or to an address", Rows: []string{"C5"},
	}}
}

// lastError returns the last error of the connection to the control plane, and how often the agent has tried to connect.
func lastError(r *Readings) string {
	xds := r.Agent.XDS
	text := "no connection so far"
	if xds.LastError != "" {
		text = xds.LastError
	}
	if xds.Reconnects > 0 {
		text += fmt.Sprintf(" (%d attempts since the start)", xds.Reconnects+1)
	}
	return text
}

func controlRefuses(r *Readings) []Problem {
	if file, _ := r.Agent.unread(); file != "" || r.Agent.connected() || !r.Agent.refuses() {
		return nil
	}
	severity, effect := withoutControl(r.Agent)
	what, mend := "the control plane %s refuses the agent", "compare the namespace, the service account and --xds-cert with what the control plane accepts: its log says why"
	switch text := r.Agent.XDS.LastError; {
	case strings.Contains(text, "x509: ") && !strings.Contains(text, "remote error: ") && !r.Agent.answered():
		what = "the agent does not accept the certificate of the control plane %s"
		mend = "compare --xds-root-ca and --xds-server-name with what openssl s_client -showcerts -connect " + r.Agent.XDS.Address + " prints"
	case strings.HasPrefix(text, "the client certificate in "):
		what, mend = "the client certificate for the control plane %s is not valid now", "put a valid one, with its key, in place; nothing needs a restart"
	case strings.Contains(text, "code = Unauthenticated") && r.Agent.Token.File != "":
		mend = "put a token at " + r.Agent.Token.File + " that the control plane accepts; nothing needs a restart"
	}
	return []Problem{{
		Severity: severity, What: fmt.Sprintf(what, r.Agent.XDS.Address),
		Evidence: lastError(r), Effect: effect, Mend: mend, Rows: []string{"C5"},
	}}
}

func controlUnreachable(r *Readings) []Problem {
	if file, _ := r.Agent.unread(); file != "" || r.Agent.connected() || r.Agent.refuses() || r.Agent.unresolved() {
		return nil
	}
	severity, effect := withoutControl(r.Agent)
	what, mend := r.Agent.unreachable()
	return []Problem{{
		Severity: severity, What: fmt.Sprintf("the control plane %s %s", r.Agent.XDS.Address, what),
		Evidence: lastError(r), Effect: effect, Mend: mend, Rows: []string{"C5"},
	}}
}

func pushRejected(r *Readings) []Problem {
	xds := r.Agent.XDS
	if !xds.Connected || xds.Rejected == 0 || xds.LastError == "" {
		return nil
	}
	severity, effect := Minor, "mesh names are answered from the previous table; changes of hosts do not arrive"
	if !xds.Loaded {
		severity, effect = Severe, "no mesh name resolves: there is no table"
	}
	return []Problem{{
		Severity: severity, What: "the agent rejects the table of the control plane " + xds.Address,
		Evidence: fmt.Sprintf("%s; %d of %d pushes", xds.LastError, xds.Rejected, xds.Pushes), Effect: effect,
		Mend: "look at the control plane's log for the NACK; if the table is too long, let the workload see fewer hosts (Sidecar, exportTo)", Rows: []string{"C3", "C8"},
	}}
}

func tableAbsent(r *Readings) []Problem {
	if r.Agent.XDS.Loaded || !r.Agent.connected() {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: fmt.Sprintf("the control plane %s has sent no table", r.Agent.XDS.Address),
		Evidence: fmt.Sprintf("connected, %d pushes", r.Agent.XDS.Pushes), Effect: "no mesh name resolves",
		Mend: "look at the control plane's log; istiod sends tables if its proxies capture DNS (ISTIO_META_DNS_CAPTURE)", Rows: []string{"C6"},
	}}
}

func tableStale(r *Readings) []Problem {
	xds := r.Agent.XDS
	if !xds.Loaded || !xds.Stale || !r.Agent.connected() {
		return nil
	}
	return []Problem{{
		Severity: Severe, What: fmt.Sprintf("mesh names are %v old: from the snapshot", age(xds.TableAge)),
		Evidence: fmt.Sprintf("the control plane %s is connected, and has sent no table since the start", xds.Address),
		Effect:   "hosts that are new since then do not resolve", Mend: "look at the control plane's log", Rows: []string{"C7"},
	}}
}
