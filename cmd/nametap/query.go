package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent/probe"
	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/dnsproxy/forward"
	"github.com/nametap/nametap/dnsproxy/resolvconf"
	"github.com/nametap/nametap/dnsproxy/wire"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/version"
	"github.com/nametap/nametap/iptables"
)

// querySpare is how much longer the command waits than the agent waits for nameservers.
const querySpare = 2 * time.Second

// A queryResult is one question with its answer, and the rule that gave the answer.
type queryResult struct {
	Name       string                `json:"name"`
	Type       string                `json:"type"`
	Rcode      string                `json:"rcode"`
	Answer     []string              `json:"answer"`
	Authority  []string              `json:"authority"`
	Additional []string              `json:"additional,omitempty"`
	Errors     []extendedError       `json:"errors"` // Extended DNS Errors, RFC 8914
	Protocol   string                `json:"protocol"`
	Took       float64               `json:"tookSeconds"`
	From       *dnsproxy.Provenance  `json:"from,omitempty"`
	NoFrom     string                `json:"noFrom,omitempty"` // why From is missing
	Rule       *dnsproxy.Explanation `json:"rule,omitempty"`
	NoRule     string                `json:"noRule,omitempty"` // why Rule is missing
	See        []string              `json:"see,omitempty"`    // addresses of the documents about Rule and From
	Trace      *queryTrace           `json:"trace,omitempty"`
	Captured   *capturedQuery        `json:"captured,omitempty"`
}

// A queryCommand is one run of nametap query.
type queryCommand struct {
	agentCommand

	trace, captured bool
}

func newQueryCommand() *cobra.Command {
	c := &queryCommand{}
	command := &cobra.Command{
		Use:   "query NAME [TYPE...]",
		Short: "Query the agent, and show the answer and the rule that gave it",
		Long: `Query the agent for the types, by default A and AAAA, and show the answers. For each
answer, show the nameserver that it came from, how long ago if it was in the cache, the
rule that gave it, the rows of docs/behaviour.md that describe the rule, and where to
read them. An address is turned into its reverse name, by default with type PTR.

--trace shows how the answer came about: the names of the search list, what the cache had,
and what each nameserver was sent and what came of it.

--captured sends the query as a client of this host does: to the first nameserver of
resolv.conf, from the socket of a user without rights, and says whether this agent has
answered it.`,
		Example: `  nametap query productpage
  nametap query reviews.default.svc.cluster.local AAAA
  nametap query 10.0.0.12
  nametap query --trace www.example.org A
  nametap query --captured productpage`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			return c.run(command.Context(), command.OutOrStdout(), args)
		},
	}
	flags := command.Flags()
	c.declare(flags)
	c.status.declareDNS()
	flags.BoolVar(&c.trace, "trace", false, "show how the answer came about: search list, cache, nameservers")
	flags.BoolVar(&c.captured, "captured", false,
		"query as a client does, by the first nameserver of resolv.conf, and say what answers")
	return command
}

func (c *queryCommand) run(ctx context.Context, w io.Writer, args []string) error {
	questions, err := parseQuestions(args[0], args[1:])
	if err != nil {
		return usageError{err}
	}
	dnsAddr, err := c.status.dnsAddr()
	if err != nil {
		return err
	}
	forwarding := &c.status.options.agent.DNS.Forward
	a := &asker{addr: dnsAddr, timeout: forwarding.Timeout, trace: c.trace, resolvConf: forwarding.ResolvConf}
	if c.captured {
		if err := a.capture(c.status.options); err != nil {
			return err
		}
	}
	results := make([]queryResult, 0, len(questions))
	for _, q := range questions {
		result, err := c.answer(ctx, a, q)
		if err != nil {
			return err
		}
		if c.trace && len(results) == 0 {
			result.Trace.findCandidates(ctx, a, args[0], q.Qtype)
		}
		results = append(results, result)
	}
	return c.output.print(w, results, func(w io.Writer) { printResults(w, results) })
}

// answer asks one question, and adds what the agent knows about the answer.
func (c *queryCommand) answer(ctx context.Context, a *asker, q dns.Question) (queryResult, error) {
	var trace *queryTrace
	if c.trace {
		trace = newTrace(ctx, &c.status, q)
	}
	result, err := a.ask(ctx, q)
	if err != nil {
		return result, err
	}
	result.Trace = trace
	a.findCaptured(ctx, &result)
	result.explain(ctx, &c.status)
	if result.From != nil {
		result.seeRows(result.From.Rows)
	}
	return result, nil
}

// parseQuestions returns a question for each type. The default types are A and AAAA or, if name is an address, PTR.
func parseQuestions(name string, types []string) ([]dns.Question, error) {
	reverse, err := dns.ReverseAddr(name)
	address := err == nil
	switch {
	case len(types) > 0:
	case address:
		types = []string{"PTR"}
	default:
		types = []string{"A", "AAAA"}
	}
	questions := make([]dns.Question, 0, len(types))
	for _, t := range types {
		qtype, err := wire.ParseType(t)
		if err != nil {
			return nil, err
		}
		qname := dns.Fqdn(name)
		if address && qtype == dns.TypePTR {
			qname = reverse
		}
		if _, err := wire.ParseName(name); err != nil {
			return nil, err
		}
		questions = append(questions, dns.Question{Name: qname, Qtype: qtype, Qclass: dns.ClassINET})
	}
	return questions, nil
}

// An asker asks questions.
type asker struct {
	addr string
	// timeout is the agent's time limit for a forwarded query.
	timeout    time.Duration
	trace      bool
	resolvConf string

	// These are set if the asker asks as a client does: user is the owner of the sockets, and agent the agent's address.
	// Then addr is the address of a nameserver.
	user  int
	agent string
}

// exchange sends a query over UDP and, if the answer is truncated, over TCP.
func (a *asker) exchange(ctx context.Context, req *dns.Msg) (resp *dns.Msg, protocol string, err error) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout+querySpare)
	defer cancel()
	for _, protocol = range []string{"udp", "tcp"} {
		var conn net.Conn
		if conn, err = a.dial(ctx, protocol); err != nil {
			return nil, protocol, err
		}
		client := dns.Client{Net: protocol, Timeout: a.timeout + querySpare}
		resp, _, err = client.ExchangeWithConnContext(ctx, req, &dns.Conn{Conn: conn})
		conn.Close()
		if err != nil || !resp.Truncated {
			break
		}
	}
	return resp, protocol, err
}

func (a *asker) dial(ctx context.Context, network string) (conn net.Conn, err error) {
	dial := func() error {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, a.addr)
		return err
	}
	if a.agent == "" || a.user == os.Geteuid() {
		err = dial()
	} else {
		err = listen.AsUser(a.user, a.user, dial)
	}
	return conn, err
}

// ask asks one question.
func (a *asker) ask(ctx context.Context, q dns.Question) (queryResult, error) {
	req := &dns.Msg{MsgHdr: dns.MsgHdr{Id: dns.Id(), RecursionDesired: true}, Question: []dns.Question{q}}
	req.SetEdns0(dnsproxy.DefaultEDNSUDPSize, false)
	dnsproxy.AskProvenance(req, a.trace)
	start := time.Now()
	resp, protocol, err := a.exchange(ctx, req)
	switch {
	case err != nil && a.agent != "":
		return queryResult{}, fmt.Errorf("no answer from %s over %s, nor do clients get one: `nametap capture check` and "+
			"`nametap status` show why: %w", a.addr, protocol, err)
	case err != nil:
		return queryResult{}, fmt.Errorf(
			"no answer from %s over %s: is the agent running? --dns-addr names another address: %w", a.addr, protocol, err)
	}
	extra := slices.DeleteFunc(slices.Clone(resp.Extra), func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
	result := queryResult{
		Name: q.Name, Type: wire.TypeName(q.Qtype), Rcode: wire.RcodeName(resp.Rcode),
		Answer: recordTexts(resp.Answer), Authority: recordTexts(resp.Ns), Additional: recordTexts(extra),
		Protocol: protocol, Took: time.Since(start).Round(10 * time.Microsecond).Seconds(),
	}
	if from, err := dnsproxy.ReadProvenance(resp); err == nil {
		result.From = &from
	} else {
		result.NoFrom = err.Error()
	}
	result.Errors = extendedErrors(resp, result.From)
	return result, nil
}

// seeRows adds the addresses of rows of docs/behaviour.md.
func (r *queryResult) seeRows(rows []string) {
	for _, row := range rows {
		r.See = append(r.See, version.Document("docs/behaviour.md#"+strings.ToLower(row)))
	}
}

func recordTexts(rrs []dns.RR) []string {
	texts := make([]string, 0, len(rrs))
	for _, rr := range rrs {
		texts = append(texts, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	return texts
}

// An extendedError is an Extended DNS Error (RFC 8914) in an answer.
type extendedError struct {
	Server string `json:"server,omitempty"` // the nameserver that sent it; "" if the agent did, or that is not known
	Code   uint16 `json:"code"`
	Name   string `json:"name,omitempty"`
	Text   string `json:"text,omitempty"`
}

// extendedErrors returns the errors in an answer. A reply of a nameserver has that server's errors; the agent only adds that
// the reply is stale.
func extendedErrors(resp *dns.Msg, from *dnsproxy.Provenance) []extendedError {
	found := []extendedError{}
	opt := resp.IsEdns0()
	if opt == nil {
		return found
	}
	for _, option := range opt.Option {
		ede, ok := option.(*dns.EDNS0_EDE)
		if !ok {
			continue
		}
		e := extendedError{Code: ede.InfoCode, Name: dns.ExtendedErrorCodeToString[ede.InfoCode], Text: ede.ExtraText}
		stale := ede.InfoCode == dns.ExtendedErrorCodeStaleAnswer || ede.InfoCode == dns.ExtendedErrorCodeStaleNXDOMAINAnswer
		if from != nil && (from.Source != forward.SourceStale || !stale) {
			e.Server = from.Server
		}
		found = append(found, e)
	}
	return found
}

// print prints the error.
func (e extendedError) print(w io.Writer) {
	label, text := "error", strings.TrimSpace(fmt.Sprintf("%d %s", e.Code, e.Name))
	if e.Server != "" {
		label += " of " + e.Server
	}
	if e.Text != "" {
		text += ": " + e.Text
	}
	fmt.Fprintf(w, "  %s: %s\n", label, clip.Line(text))
}

// explain adds the rule that gave the answer.
func (r *queryResult) explain(ctx context.Context, status *statusClient) {
	var explanation dnsproxy.Explanation
	err := status.get(ctx, "/debug/explain", url.Values{"name": {r.Name}, "type": {r.Type}}, &explanation)
	if err != nil {
		r.NoRule = err.Error()
		return
	}
	r.Rule = &explanation
	r.seeRows(explanation.Rows)
}

func printResults(w io.Writer, results []queryResult) {
	for i, r := range results {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s %s: %s in %s over %s\n", r.Name, r.Type, r.Rcode, seconds(r.Took), r.Protocol)
		for _, record := range r.Answer {
			fmt.Fprintf(w, "  %s\n", record)
		}
		for _, record := range r.Authority {
			fmt.Fprintf(w, "  authority: %s\n", record)
		}
		for _, record := range r.Additional {
			fmt.Fprintf(w, "  additional: %s\n", record)
		}
		for _, e := range r.Errors {
			e.print(w)
		}
		r.Captured.print(w)
		r.printFrom(w)
		if r.Rule == nil {
			fmt.Fprintf(w, "  rule: unknown: %s\n", r.NoRule)
		} else {
			fmt.Fprintf(w, "  rule: %s (%s): %s\n", r.Rule.Rule, strings.Join(r.Rule.Rows, ", "), r.Rule.Why)
		}
		r.Trace.print(w, &r)
		for _, address := range r.See {
			fmt.Fprintf(w, "  see: %s\n", address)
		}
	}
}

// printFrom prints where the answer came from, if that was a nameserver or the cache.
func (r *queryResult) printFrom(w io.Writer) {
	switch {
	case r.From == nil:
		fmt.Fprintf(w, "  from: unknown: %s\n", clip.Line(r.NoFrom))
	case r.From.String() == "":
	case len(r.From.Rows) == 0:
		fmt.Fprintf(w, "  from: %s\n", clip.Line(r.From.String()))
	default:
		fmt.Fprintf(w, "  from (%s): %s\n", strings.Join(r.From.Rows, ", "), clip.Line(r.From.String()))
	}
}

// A capturedQuery says which server answers a query of a client of this host.
type capturedQuery struct {
	Server string `json:"server"` // the first nameserver of resolv.conf
	UID    int    `json:"uid"`    // the owner of the socket
	By     string `json:"by"`     // agent, otherAgent or server
	ID     string `json:"id,omitempty"`
}

// The servers that may have answered a captured query.
const (
	byAgent      = "agent"      // the agent of --dns-addr
	byOtherAgent = "otherAgent" // another agent
	byServer     = "server"     // no agent
)

// capture makes the asker send queries as a client does: to the first nameserver of resolv.conf, which the rules
// redirect to the agent.
func (a *asker) capture(o *options) error {
	path := o.agent.DNS.Forward.ResolvConf
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the nameserver to ask: %w", err)
	}
	// If the file names the stub of systemd-resolved, clients query the stub. resolvconf.Files.Read would return the
	// nameservers behind it.
	servers := resolvconf.Parse(text).Servers
	if len(servers) == 0 {
		return fmt.Errorf("%s names no nameserver, so clients ask 127.0.0.1: query that with --dns-addr", path)
	}
	if a.user, err = clientUser(&o.capture.Config); err != nil {
		return err
	}
	a.agent, a.addr = a.addr, servers[0].String()
	return nil
}

// clientUser returns a user whose queries are captured: the user of this command or, instead of root, one without rights
// whose number is also that of a group without rights.
func clientUser(c *iptables.Config) (int, error) {
	uid, gid := os.Geteuid(), os.Getegid()
	if uid == 0 {
		uid, gid = probe.Nobody, probe.Nobody
	}
	passes := func() bool {
		return slices.Contains(slices.Concat(c.AgentUIDs, c.ExcludeUIDs), uint32(uid)) || //nolint:gosec // an id
			slices.Contains(slices.Concat(c.AgentGIDs, c.ExcludeGIDs), uint32(gid)) //nolint:gosec // an id
	}
	for os.Geteuid() == 0 && passes() {
		uid, gid = uid-1, gid-1
	}
	if passes() {
		return 0, fmt.Errorf("queries of this user (uid %d, gid %d) are not captured, since it is the agent's, or "+
			"excluded by --capture-exclude-uid or --capture-exclude-gid: run this command as root or as another user", uid, gid)
	}
	return uid, nil
}

// findCaptured finds out which server has answered a query.
func (a *asker) findCaptured(ctx context.Context, r *queryResult) {
	if a.agent == "" {
		return
	}
	r.Captured = &capturedQuery{Server: a.addr, UID: a.user, By: byServer}
	if r.From == nil {
		return // the server is no agent, and may never answer a question about itself
	}
	found := probe.All(ctx, probe.Query{Network: "udp", To: a.addr, As: a.user}, probe.Query{Network: "udp", To: a.agent})
	switch r.Captured.ID = found[0].ID; {
	case found[0].State != probe.Agent:
	case found[1].ID == found[0].ID:
		r.Captured.By = byAgent
	default:
		r.Captured.By = byOtherAgent
	}
}

// print prints which server has answered. It prints nothing if c is nil.
func (c *capturedQuery) print(w io.Writer) {
	if c == nil {
		return
	}
	by := map[string]string{
		byAgent:      fmt.Sprintf("this agent (%s): queries of clients reach it", clip.Line(c.ID)),
		byOtherAgent: fmt.Sprintf("another agent of nametap (%s), not the one at --dns-addr", clip.Line(c.ID)),
		byServer: "another server, not an agent of nametap: queries of clients are not captured; `nametap capture " +
			"check` and `nametap status` show why",
	}[c.By]
	fmt.Fprintf(w, "  captured: the query of uid %d to %s was answered by %s\n", c.UID, c.Server, by)
}
