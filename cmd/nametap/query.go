package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"
	"github.com/spf13/cobra"

	"github.com/nametap/nametap/dnsproxy"
	"github.com/nametap/nametap/internal/version"
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
	Errors     []string              `json:"errors"` // Extended DNS Errors, RFC 8914
	Protocol   string                `json:"protocol"`
	Duration   string                `json:"duration"`
	From       *dnsproxy.Provenance  `json:"from,omitempty"`
	NoFrom     string                `json:"noFrom,omitempty"` // why From is missing
	Rule       *dnsproxy.Explanation `json:"rule,omitempty"`
	NoRule     string                `json:"noRule,omitempty"` // why Rule is missing
	See        []string              `json:"see,omitempty"`    // addresses of the documents about Rule and From
	Egress     *vipUse               `json:"egress,omitempty"` // if the answer has automatic VIPs
}

func newQueryCommand() *cobra.Command {
	var (
		status statusClient
		output string
	)
	command := &cobra.Command{
		Use:   "query NAME [TYPE...]",
		Short: "Query the agent, and show the answer and the rule that gave it",
		Long: `Query the agent for the types, by default A and AAAA, and show the answers. For each
answer, show the nameserver that it came from, how long ago if it was in the cache, the
rule that gave it, the rows of docs/behaviour.md that describe the rule, and where to
read them. An address with type PTR is turned into its reverse name.`,
		Example: `  nametap query productpage
  nametap query reviews.default.svc.cluster.local AAAA
  nametap query 10.0.0.12 PTR`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			questions, err := parseQuestions(args[0], args[1:])
			if err != nil {
				return usageError{err}
			}
			dnsAddr, err := status.dnsAddr()
			if err != nil {
				return err
			}
			results := make([]queryResult, 0, len(questions))
			for _, q := range questions {
				result, err := ask(command.Context(), dnsAddr, q, status.options.agent.DNS.Forward.Timeout)
				if err != nil {
					return err
				}
				result.explain(command.Context(), &status)
				if result.From != nil {
					result.seeRows(result.From.Rows)
				}
				result.findEgress(command.Context(), &status)
				results = append(results, result)
			}
			return printOutput(command.OutOrStdout(), output, results, func(w io.Writer) error { return printResults(w, results) })
		},
	}
	status.declare(command.Flags())
	status.declareDNS()
	declareOutput(command.Flags(), &output)
	return command
}

// parseQuestions returns a question for each type, or for A and AAAA if there are none.
func parseQuestions(name string, types []string) ([]dns.Question, error) {
	if len(types) == 0 {
		types = []string{"A", "AAAA"}
	}
	questions := make([]dns.Question, 0, len(types))
	for _, t := range types {
		qtype, known := dns.StringToType[strings.ToUpper(t)]
		if !known {
			return nil, fmt.Errorf("type %q: want a record type such as A, AAAA or PTR", t)
		}
		qname := dns.Fqdn(name)
		if qtype == dns.TypePTR {
			if reverse, err := dns.ReverseAddr(name); err == nil {
				qname = reverse
			}
		}
		if _, ok := dns.IsDomainName(qname); !ok {
			return nil, fmt.Errorf("name %q: want a domain name", name)
		}
		questions = append(questions, dns.Question{Name: qname, Qtype: qtype, Qclass: dns.ClassINET})
	}
	return questions, nil
}

// ask sends one question over UDP and, if the answer is truncated, over TCP. timeout is the
// agent's own for a forwarded query.
func ask(ctx context.Context, addr string, q dns.Question, timeout time.Duration) (queryResult, error) {
	req := &dns.Msg{MsgHdr: dns.MsgHdr{Id: dns.Id(), RecursionDesired: true}, Question: []dns.Question{q}}
	dnsproxy.AskProvenance(req.SetEdns0(dnsproxy.DefaultEDNSUDPSize, false))
	ctx, cancel := context.WithTimeout(ctx, timeout+querySpare)
	defer cancel()
	start := time.Now()
	var resp *dns.Msg
	var protocol string
	for _, protocol = range []string{"udp", "tcp"} {
		var err error
		client := dns.Client{Net: protocol, Timeout: timeout + querySpare}
		if resp, _, err = client.ExchangeContext(ctx, req, addr); err != nil {
			return queryResult{}, fmt.Errorf("no answer from %s over %s: is the agent running? --dns-addr names another address: %w", addr, protocol, err)
		}
		if !resp.Truncated {
			break
		}
	}
	extra := slices.DeleteFunc(slices.Clone(resp.Extra), func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })
	result := queryResult{
		Name: q.Name, Type: dns.TypeToString[q.Qtype], Rcode: rcodeName(resp.Rcode),
		Answer: recordTexts(resp.Answer), Authority: recordTexts(resp.Ns), Additional: recordTexts(extra), Errors: extendedErrors(resp),
		Protocol: protocol, Duration: time.Since(start).Round(10 * time.Microsecond).String(),
	}
	from, err := dnsproxy.ReadProvenance(resp)
	if err != nil {
		result.NoFrom = err.Error()
		return result, nil
	}
	result.From = &from
	return result, nil
}

// seeRows adds the addresses of rows of docs/behaviour.md.
func (r *queryResult) seeRows(rows []string) {
	for _, row := range rows {
		r.See = append(r.See, version.Document("docs/behaviour.md#"+strings.ToLower(row)))
	}
}

// rcodeName returns the name of a response code. The library's name for 16 is BADSIG, which
// is the meaning in a TSIG record; in a message it is BADVERS.
func rcodeName(rcode int) string {
	if rcode == dns.RcodeBadVers {
		return "BADVERS"
	}
	if name, ok := dns.RcodeToString[rcode]; ok {
		return name
	}
	return fmt.Sprintf("RCODE%d", rcode)
}

func recordTexts(rrs []dns.RR) []string {
	texts := make([]string, 0, len(rrs))
	for _, rr := range rrs {
		texts = append(texts, strings.ReplaceAll(rr.String(), "\t", " "))
	}
	return texts
}

func extendedErrors(resp *dns.Msg) []string {
	texts := []string{}
	if opt := resp.IsEdns0(); opt != nil {
		for _, option := range opt.Option {
			if ede, ok := option.(*dns.EDNS0_EDE); ok {
				texts = append(texts, fmt.Sprintf("%s: %s", dns.ExtendedErrorCodeToString[ede.InfoCode], ede.ExtraText))
			}
		}
	}
	return texts
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

func printResults(w io.Writer, results []queryResult) error {
	var text strings.Builder
	for i, r := range results {
		if i > 0 {
			text.WriteByte('\n')
		}
		fmt.Fprintf(&text, "%s %s: %s in %s over %s\n", r.Name, r.Type, r.Rcode, r.Duration, r.Protocol)
		for _, record := range r.Answer {
			fmt.Fprintf(&text, "  %s\n", record)
		}
		for _, record := range r.Authority {
			fmt.Fprintf(&text, "  authority: %s\n", record)
		}
		for _, record := range r.Additional {
			fmt.Fprintf(&text, "  additional: %s\n", record)
		}
		for _, e := range r.Errors {
			fmt.Fprintf(&text, "  error: %s\n", e)
		}
		r.printFrom(&text)
		if r.Rule == nil {
			fmt.Fprintf(&text, "  rule: unknown: %s\n", r.NoRule)
		} else {
			fmt.Fprintf(&text, "  rule: %s (%s): %s\n", r.Rule.Rule, strings.Join(r.Rule.Rows, ", "), r.Rule.Why)
		}
		for _, address := range r.See {
			fmt.Fprintf(&text, "  see: %s\n", address)
		}
		r.Egress.print(&text)
	}
	_, err := io.WriteString(w, text.String())
	return err
}

// printFrom prints where the answer came from, if that was a nameserver or the cache.
func (r *queryResult) printFrom(w io.Writer) {
	switch {
	case r.From == nil:
		fmt.Fprintf(w, "  from: unknown: %s\n", r.NoFrom)
	case r.From.String() == "":
	case len(r.From.Rows) == 0:
		fmt.Fprintf(w, "  from: %s\n", r.From)
	default:
		fmt.Fprintf(w, "  from (%s): %s\n", strings.Join(r.From.Rows, ", "), r.From)
	}
}
