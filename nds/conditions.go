package nds

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nametap/nametap/internal/condition"
)

// The codes of what keeps the client from the control plane, each with the ones that explain it.
const (
	clockBehind        condition.Code = "clock_behind"
	controlFile        condition.Code = "control_plane_file"
	tokenExpired       condition.Code = "token_expired"
	certificateExpired condition.Code = "certificate_expired"
	controlRefuses     condition.Code = "control_plane_refuses"
	controlUnresolved  condition.Code = "control_plane_unresolved"
	controlUnreachable condition.Code = "control_plane_unreachable"
	pushRejected       condition.Code = "push_rejected"
)

// A failure is why an attempt to connect has ended.
type failure struct {
	code     condition.Code
	what     string // with %s for the address of the control plane
	mend     string
	evidence string
	at       time.Time
}

// failureCounts is how long a failure counts. While the client does not get a connection, its errors may alternate: a
// server that refuses a certificate sends an alert, and may close the connection before the client has read it. The
// longest time between the ends of two attempts is 50 s.
const failureCounts = 90 * time.Second

// advise adds to err, the error that f describes, what to do, if its cause is known.
func (f failure) advise(err error) error {
	if f.mend == "" {
		return err
	}
	return fmt.Errorf("%w; %s", err, f.mend)
}

const (
	notConnected = "the control plane %s is not connected"
	refuses      = "the control plane %s refuses the agent"
	unaccepted   = "the agent does not accept the certificate of the control plane %s"
)

// classify describes an error of an attempt to reach the server at addr, which flag sets.
func classify(cfg Config, addr, flag string, err error) failure {
	f := failure{code: controlUnreachable, what: notConnected, evidence: err.Error(), at: time.Now()}
	_, fromGRPC := status.FromError(err)
	connection := strings.Contains(f.evidence, "connection error: ") || strings.Contains(f.evidence, "error reading from server: ")
	switch code := status.Code(err); {
	case errors.As(err, new(fileError)):
		f.code = controlFile
	case code == codes.Unauthenticated:
		f.code, f.what, f.mend = controlRefuses, refuses, tokenAdvice(cfg)
	case code == codes.PermissionDenied:
		f.code, f.what = controlRefuses, refuses
		f.mend = fmt.Sprintf("the token or certificate must be for namespace %q (--namespace) and service account %q (--service-account)",
			cfg.Node.Namespace, cfg.Node.ServiceAccount)
	case fromGRPC && !connection: // the server's message, which may quote an error of another connection
		f.what = "the control plane %s answers, and ends the connection"
	case errors.As(err, new(*net.DNSError)):
		f.code, f.what = controlUnresolved, "the name of the control plane %s does not resolve"
		f.mend = "the nameservers of this host must know that name: look at resolv.conf, or set " + flag + " to another name or an address"
	default:
		known := causes(cfg, addr, flag)
		if i := slices.IndexFunc(known, func(c cause) bool { return strings.Contains(f.evidence, c.text) }); i >= 0 {
			f.code, f.what, f.mend = known[i].code, known[i].what, known[i].mend
		}
	}
	return f
}

// A cause is what an error with a text means, see [failure].
type cause struct {
	text       string
	code       condition.Code
	what, mend string
}

// causes returns the known causes. The first one whose text is in an error counts.
func causes(cfg Config, addr, flag string) []cause {
	firewalls := "look at the firewalls between this host and the server, and at " + flag
	preface := "the server ended the connection: look at its log"
	if cfg.Plaintext {
		preface = "if the server wants TLS, leave out --xds-plaintext, or use another port (" + flag + ")"
	}
	roots := "a certificate in " + cfg.RootCA
	if cfg.RootCA == "" {
		roots = "the system's root certificates"
	}
	return []cause{
		{"does not look like a TLS handshake", controlUnreachable, "the control plane %s does not speak TLS", "the server does not speak TLS: --xds-plaintext, or another port (" + flag + ")"},
		{"remote error: tls: ", controlRefuses, refuses, "the server wants a client certificate that it trusts (--xds-cert, --workload-cert), or another name (--xds-server-name): look at its log"},
		{"error reading server preface", controlUnreachable, "the control plane %s ends connections at once", preface},
		{"certificate signed by unknown authority", controlRefuses, unaccepted, "the server's certificate is not signed by " + roots + " (XDS_ROOT_CA, --xds-root-ca)"},
		{"certificate is valid for ", controlRefuses, unaccepted, "the expected name is --xds-server-name"},
		{"certificate is not valid for any names", controlRefuses, unaccepted, "the expected name is --xds-server-name"},
		{"certificate has expired or is not yet valid", controlRefuses, unaccepted, "look at the clock of this host and at the server's certificate"},
		{"certificate", controlRefuses, unaccepted, "compare --xds-root-ca and --xds-server-name with what openssl s_client -showcerts -connect " + addr + " prints"},
		{"operation not permitted", controlUnreachable, "the control plane %s cannot be reached: a firewall of this host drops the connections of the agent", "allow that connection for the agent's user in that firewall"},
		{"connection refused", controlUnreachable, "the control plane %s refuses connections", "start the server at " + addr + ", or correct the address (" + flag + ")"},
		{"ended the connection before", controlUnreachable, "the control plane %s ends connections at once", "look at the server's log, and at proxies before it: one of them drains, or limits the age of connections"},
		{"but no stream within", controlUnreachable, "the control plane %s accepts connections, but no stream", "look at what is between the server and this host; " + flag + " may have the wrong port"},
		{"i/o timeout", controlUnreachable, "the control plane %s does not answer", firewalls},
		{"deadline exceeded", controlUnreachable, "the control plane %s does not answer", firewalls},
		{"unreachable", controlUnreachable, "the control plane %s cannot be reached from this host", "look at `ip route get` with its address"},
	}
}

// tokenAdvice returns the advice for a server that did not authenticate the client.
func tokenAdvice(cfg Config) string {
	switch {
	case cfg.Plaintext:
		return "without TLS no token is sent: leave out --xds-plaintext"
	case cfg.TokenFile == "" && cfg.CertFile != "":
		return "the client certificate in " + cfg.CertFile + " (--xds-cert) was refused, and no token was sent (--xds-token-file)"
	case cfg.TokenFile == "":
		return "no token was sent, since --xds-token-file is empty"
	}
	if token, err := readToken(cfg); err == nil {
		if err := checkToken(cfg, token); err != nil {
			return err.Error()
		}
	}
	refused := "the token in " + cfg.TokenFile + " (--xds-token-file) was refused; istiod wants the audience istio-ca"
	if cfg.Node.ClusterID != defaultClusterID { // see readCredentials
		refused += fmt.Sprintf(" and must know the cluster %q (--cluster-id)", cfg.Node.ClusterID)
	}
	return refused
}

// Conditions says what is wrong with the connection to the control plane, its credentials and the table. What is on this
// host, such as dates of certificates, is read now. Errors of the connection follow: of those in the last time
// [failureCounts], the one that says most.
func (c *Client) Conditions() []condition.Condition {
	d := c.diagnose()
	return slices.Concat(d.credentials(), d.connection(), d.tables())
}

// A diagnosis has what conditions of a client are made from.
type diagnosis struct {
	Status
	cfg      Config
	now      time.Time
	token    Token
	unusable *failure // why a file cannot be used
	outdated error    // of the client certificate
	failure  *failure // the failure to connect that says most; nil while there is a stream
	saved    bool     // whether the table was saved since the start
	rejects  string   // why the last push was rejected; "" if it is in use
}

func (c *Client) diagnose() diagnosis {
	d := diagnosis{Status: c.Status(), cfg: c.cfg, now: time.Now(), token: tokenOf(c.cfg), saved: c.saver.hasSaved()}
	creds, err := readCredentials(c.cfg, c.renewer.valid(), c.cfg.ServerName)
	if err != nil {
		d.unusable = &failure{evidence: err.Error()}
	} else if c.cfg.CertFile != "" {
		d.outdated = creds.outdated
	}
	c.state.mu.Lock()
	defer c.state.mu.Unlock()
	d.rejects = c.state.rejection
	if d.connected() {
		return d
	}
	d.failure = &failure{code: controlUnreachable, what: notConnected, evidence: "no connection so far"}
	for _, code := range []condition.Code{controlUnreachable, controlUnresolved, controlRefuses, controlFile} { // the last one says most
		f, found := c.state.failures[code]
		switch {
		case !found || d.now.Sub(f.at) > failureCounts:
		case code == controlFile:
			d.unusable = cmp.Or(d.unusable, &f)
		default:
			d.failure = &f
		}
	}
	return d
}

// connected reports whether there is a stream, even if it has carried no push yet.
func (d *diagnosis) connected() bool { return d.Connected || d.Open }

// needsToken reports whether the next connection needs the token.
func (d *diagnosis) needsToken() bool {
	return d.token.File != "" && !d.CertificateExpires.After(d.now)
}

// withoutControl completes a problem that keeps the client from the control plane: its severity, effect and rows.
func (d *diagnosis) withoutControl(p condition.Problem) []condition.Problem {
	p.Severity = condition.Minor
	switch {
	case d.Connected && d.Loaded:
		p.Effect = "none until the connection ends"
	case !d.Loaded:
		p.Severity, p.Effect = condition.Severe, "no mesh name resolves: there is no table"
	case d.Stale:
		p.Severity, p.Effect = condition.Severe, fmt.Sprintf("mesh names are answered from the snapshot, %v old: hosts that are new since then do not resolve", age(d.TableAge))
	default:
		p.Effect = "mesh names are answered from the current table; changes of hosts do not arrive"
	}
	if p.Rows == nil {
		p.Rows = []string{"C1"}
	}
	return []condition.Problem{p}
}

// age returns seconds as a duration, rounded to seconds.
func age(seconds float64) time.Duration {
	return (time.Duration(seconds) * time.Second).Round(time.Second)
}

func date(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// clockTolerance is how far the clock of this host may be behind without being a problem.
const clockTolerance = time.Minute

// credentials returns the conditions of the clock and of files on this host. One reading proves them.
func (d *diagnosis) credentials() []condition.Condition {
	clock := condition.Condition{Code: clockBehind, Title: "the clock is not behind that of the cluster"}
	if behind := d.token.Issued.Sub(d.now); d.token.Issued.IsZero() {
		clock.Unknown = "no token says when it was issued"
	} else if behind > clockTolerance {
		clock.Problems = d.withoutControl(condition.Problem{
			Certain: true, What: fmt.Sprintf("the clock of this host is at least %v behind that of the cluster", behind.Round(time.Second)),
			Evidence: fmt.Sprintf("the token in %s was issued at %s", d.token.File, date(d.token.Issued)),
			Mend:     "timedatectl set-ntp true", Rows: []string{"V7"},
		})
	}
	files := condition.Condition{Code: controlFile, Title: "the files for the control plane can be used"}
	if d.cfg.Plaintext {
		files.Unknown = "without TLS there are none"
	}
	if d.unusable != nil {
		file, reason, _ := strings.Cut(strings.TrimPrefix(d.unusable.evidence, "reading "), ": ")
		mend := "put that file in place; nothing needs a restart"
		if strings.HasSuffix(reason, "permission denied") {
			mend = "let the user of the agent read that file; nothing needs a restart"
		}
		files.Problems = d.withoutControl(condition.Problem{Certain: true, What: "the agent cannot use " + file, Evidence: reason, Mend: mend})
	}
	certificate := condition.Condition{Code: certificateExpired, Title: "the client certificate is valid now", Causes: []condition.Code{clockBehind, controlFile}}
	if d.cfg.CertFile == "" || d.cfg.Plaintext {
		certificate.Unknown = "no client certificate is set"
	} else if d.outdated != nil {
		certificate.Problems = d.withoutControl(condition.Problem{
			Certain: true, What: "the client certificate for the control plane is not valid now", Evidence: d.outdated.Error(),
			Mend: "put a valid one at " + d.cfg.CertFile + ", with its key; nothing needs a restart",
		})
	}
	return append(d.tokens(), clock, files, certificate)
}

// tokens returns the conditions of the token's expiry.
func (d *diagnosis) tokens() []condition.Condition {
	expired := condition.Condition{Code: tokenExpired, Title: "the token has not expired"}
	soon := condition.Condition{Code: "token_expires", Title: "the token is renewed in time", Causes: []condition.Code{tokenExpired}}
	// kubelet replaces a token at four fifths of its life.
	left, life := d.token.Expires.Sub(d.now), d.token.Expires.Sub(d.token.Issued)
	switch {
	case d.token.File == "":
		expired.Unknown = "no token is sent"
	case !d.needsToken():
		expired.Unknown = "the certificate is used, not the token"
	case d.token.Expires.IsZero():
		expired.Unknown = "the token does not say when it expires"
	case left <= 0:
		evidence := fmt.Sprintf("the token in %s expired at %s, and there is no workload certificate", d.token.File, date(d.token.Expires))
		if d.failure != nil {
			evidence += "; " + d.evidence()
		}
		expired.Problems = d.withoutControl(condition.Problem{
			Certain: true, What: "the token for the control plane has expired", Evidence: evidence,
			Mend: "put a new token at " + d.token.File + "; nothing needs a restart",
		})
	case !d.token.Issued.IsZero() && left <= life/10:
		soon.Problems = []condition.Problem{{
			Severity: condition.Minor, Certain: true,
			What:     fmt.Sprintf("the token for the control plane expires in %v, and nothing has replaced it", left.Round(time.Second)),
			Evidence: fmt.Sprintf("the token in %s expires at %s, and there is no workload certificate", d.token.File, date(d.token.Expires)),
			Effect:   "none until the token expires; then the control plane refuses the agent", Mend: "put a new token at " + d.token.File, Rows: []string{"C1"},
		}}
	}
	soon.Unknown = expired.Unknown
	return []condition.Condition{expired, soon}
}

// local returns the codes of problems on this host that keep the client from the control plane, and more codes.
func local(more ...condition.Code) []condition.Code {
	return append([]condition.Code{condition.ConntrackFull, clockBehind, controlFile, tokenExpired, certificateExpired}, more...)
}

// connection returns the conditions of failures to connect: at most one of them has a problem.
func (d *diagnosis) connection() []condition.Condition {
	all := []condition.Condition{
		{Code: controlUnresolved, Title: "the name of the control plane resolves", Causes: local(condition.Unanswered()...)},
		{Code: controlRefuses, Title: "the control plane accepts the agent", Causes: local()},
		{Code: controlUnreachable, Title: "the control plane is connected", Causes: local(condition.ListenerSilent)},
	}
	for i := range all {
		switch c := &all[i]; {
		case d.failure == nil:
		case d.failure.code != c.Code:
			c.Unknown = "the control plane is not connected"
		default:
			c.Problems = d.withoutControl(condition.Problem{
				What: fmt.Sprintf(d.failure.what, d.Address), Evidence: d.evidence(), Rows: []string{"C5"},
				Mend: cmp.Or(d.failure.mend, "look at the control plane's log, and at --xds-addr"),
			})
		}
	}
	return all
}

// evidence returns the failure to connect, and how often the client has tried.
func (d *diagnosis) evidence() string {
	if d.Reconnects == 0 {
		return d.failure.evidence
	}
	return fmt.Sprintf("%s (%d attempts since the start)", d.failure.evidence, d.Reconnects+1)
}

// tables returns the conditions of what the control plane sends, and of what is saved.
func (d *diagnosis) tables() []condition.Condition {
	unconnected := local(controlUnresolved, controlRefuses, controlUnreachable)
	renewed := condition.Condition{Code: "certificate", Title: "the workload certificate is renewed", Causes: unconnected}
	if d.CertificateError != "" {
		p := condition.Problem{
			Severity: condition.Minor, What: "the workload certificate cannot be obtained or renewed", Evidence: d.CertificateError,
			Effect: "none while the token is accepted", Mend: "check --ca-addr, or disable the exchange with --workload-cert off", Rows: []string{"C1"},
		}
		if !d.CertificateExpires.IsZero() {
			p.Effect = "none until the certificate expires at " + date(d.CertificateExpires)
		}
		renewed.Problems = []condition.Problem{p}
	} else if d.CertificateExpires.IsZero() || d.cfg.CertFile != "" {
		renewed.Unknown = "there is no workload certificate"
	}
	rejected := condition.Condition{Code: pushRejected, Title: "the last push is in use", Causes: unconnected}
	if !d.Connected {
		rejected.Unknown = "the control plane has sent nothing on this connection"
	} else if d.rejects != "" {
		p := condition.Problem{
			Severity: condition.Minor, What: "the agent rejects the table of the control plane " + d.Address,
			Evidence: fmt.Sprintf("%s; %d of %d pushes", d.rejects, d.Rejected, d.Pushes),
			Effect:   "mesh names are answered from the previous table; changes of hosts do not arrive",
			Mend:     "look at the control plane's log for the NACK; if the table is too long, let the workload see fewer hosts (Sidecar, exportTo)", Rows: []string{"C3", "C8"},
		}
		if !d.Loaded {
			p.Severity, p.Effect = condition.Severe, "no mesh name resolves: there is no table"
		}
		rejected.Problems = []condition.Problem{p}
	}
	absent := condition.Condition{Code: "table_absent", Title: "there is a table of mesh names", Causes: append(unconnected, pushRejected)}
	if !d.Loaded && d.connected() {
		absent.Problems = []condition.Problem{{
			Severity: condition.Severe, What: fmt.Sprintf("the control plane %s has sent no table", d.Address), Evidence: fmt.Sprintf("connected, %d pushes", d.Pushes),
			Effect: "no mesh name resolves", Mend: "look at the control plane's log; istiod sends tables if its proxies capture DNS (ISTIO_META_DNS_CAPTURE)", Rows: []string{"C6"},
		}}
	}
	stale := condition.Condition{Code: "table_stale", Title: "the control plane has confirmed the table", Causes: append(absent.Causes, absent.Code)}
	if d.Loaded && d.Stale && d.connected() {
		stale.Problems = []condition.Problem{{
			Severity: condition.Severe, What: fmt.Sprintf("mesh names are %v old: from the snapshot", age(d.TableAge)),
			Evidence: fmt.Sprintf("the control plane %s is connected, and has sent no table since the start", d.Address),
			Effect:   "hosts that are new since then do not resolve", Mend: "look at the control plane's log", Rows: []string{"C7"},
		}}
	}
	return []condition.Condition{renewed, rejected, absent, stale, d.snapshot()}
}

// snapshot returns the condition of the snapshot.
func (d *diagnosis) snapshot() condition.Condition {
	c := condition.Condition{Code: "state_dir", Title: "the table is saved in the state directory"}
	switch {
	case d.cfg.StateDir == "":
		c.Unknown = "there is no state directory"
	case d.SnapshotError == "" && !d.saved:
		c.Unknown = "no table was saved since the start"
	case d.SnapshotError != "":
		mend := "let the agent's user write to " + d.cfg.StateDir + ", or set --state-dir"
		if strings.Contains(d.SnapshotError, "no space left") {
			mend = "df " + d.cfg.StateDir + "; make room on that file system, or set --state-dir"
		}
		c.Problems = []condition.Problem{{
			Severity: condition.Minor, What: "the table cannot be saved in " + d.cfg.StateDir, Evidence: d.SnapshotError,
			Effect: "after a restart without the control plane no mesh name resolves",
			Mend:   mend + "; the agent tries again at the next push, and after 30 min at most", Rows: []string{"C7"},
		}}
	}
	return c
}

// A fileError is the error of a file that the client needs to connect.
type fileError struct {
	what string // what the file is, and the setting that names it
	err  error
}

func (e fileError) Error() string { return "reading " + e.what + ": " + e.err.Error() }
func (e fileError) Unwrap() error { return e.err }
