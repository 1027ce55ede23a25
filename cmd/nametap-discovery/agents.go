package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/discovery"
	"github.com/nametap/nametap/discovery/push"
	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/httpguard"
	"github.com/nametap/nametap/internal/listen"
	"github.com/nametap/nametap/internal/settings"
)

const (
	agentsPath = "/debug/agents"
	// The parameters of agentsPath: agents of one namespace, and only agents that are behind.
	paramNamespace = "namespace"
	paramBehind    = "behind"
	// maxListings is how many clients may read agentsPath at the same time, which costs 16 bytes for each agent.
	maxListings = 2
)

// A listing is a line of agentsPath: an agent or, in the last line, the summary.
type listing struct {
	*push.Agent
	Summary *fleet `json:"summary,omitempty"`
}

// A fleet counts agents. If Namespace is set, it counts only the agents of that namespace.
type fleet struct {
	Replica   string                  `json:"replica"`
	Namespace string                  `json:"namespace,omitempty"`
	Agents    int                     `json:"agents"`
	Behind    int                     `json:"behind"`
	States    map[push.AgentState]int `json:"states"`
	Hidden    []string                `json:"hidden,omitempty"` // why hosts of namespaces are hidden
}

// agentsHandler serves the state of the agents to programs on this host, one agent in a line. It reads the state of an
// agent only when there is room for the agent's line. So a slow client costs little memory, and no lock is held while
// lines are sent to it.
func agentsHandler(server *discovery.Server) http.Handler {
	dumps := httpguard.NewDumps(maxListings, "the agents")
	return httpguard.LocalOnly(dumps.Limited(func(w *httpguard.Dump, r *http.Request) {
		query := r.URL.Query()
		w.Header().Set("Content-Type", "application/x-ndjson")
		lines := json.NewEncoder(w) // w panics if the client has disconnected, so Encode returns no error
		all := fleet{Replica: server.Replica(), Namespace: query.Get(paramNamespace), States: map[push.AgentState]int{}}
		for agent := range server.Agents(all.Namespace) {
			all.Agents++
			all.States[agent.State]++
			if agent.Behind {
				all.Behind++
			}
			if agent.Behind || !query.Has(paramBehind) {
				_ = lines.Encode(agent)
			}
		}
		all.Hidden = server.Hidden(all.Namespace)
		_ = lines.Encode(listing{Summary: &all})
	}))
}

const agentsHelp = `Show the agents that are connected to the nametap-discovery on this host, and whether each has
the table that it should have: when it was last sent a push, when it last acknowledged one, and
what it said of the last push that it rejected.

With several replicas, each shows its own agents. Ask each of them, in its pod:

  kubectl -n nametap-system exec POD -- nametap-discovery agents --stale

or from here: kubectl -n nametap-system port-forward POD 15014, and run this command meanwhile.`

// An agentsCommand is the command agents.
type agentsCommand struct {
	server            *options // the settings of the server: the environment may have any of them
	namespace, output string
	stale             bool
	stdout            io.Writer
}

func newAgents(stdout io.Writer) *cobra.Command {
	c := agentsCommand{server: newOptions(), stdout: stdout}
	server := pflag.NewFlagSet("", pflag.ContinueOnError)
	c.server.addFlags(server)
	server.VisitAll(func(flag *pflag.Flag) { flag.Hidden = true })
	address := server.Lookup("http-addr")
	address.Hidden, address.Usage = false, "status `address` of nametap-discovery [NAMETAP_HTTP_ADDR]"
	cmd := &cobra.Command{
		Use:     "agents [--stale] [--namespace NS]",
		Short:   "Show the agents of the nametap-discovery on this host, and whether each has its table",
		Long:    agentsHelp,
		Example: "  nametap-discovery agents --stale\n  nametap-discovery agents --namespace shop --output json | jq -r 'select(.behind) | .name'",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settings.FromEnvironment(server, os.Environ()); err != nil {
				return usageError{err}
			}
			if err := checkOutput(c.output); err != nil {
				return err
			}
			return c.run(cmd.Context())
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.BoolVar(&c.stale, "stale", false, "only agents that are behind: they have not answered the last push, or were not sent what has changed, for 10s, or have rejected it")
	flags.StringVarP(&c.namespace, "namespace", "n", "", "only agents of this `namespace`")
	flags.AddFlagSet(server)
	flags.StringVarP(&c.output, "output", "o", outputText, "`format`: text, or json with an agent in each line")
	return cmd
}

// run requests the agents and prints them.
func (c *agentsCommand) run(ctx context.Context) error {
	address, err := listen.Reachable(c.server.httpAddr)
	if err != nil {
		return usageError{fmt.Errorf("--http-addr=%q: %w", c.server.httpAddr, err)}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute) // the server takes no longer
	defer cancel()
	query := url.Values{}
	if c.namespace != "" {
		query.Set(paramNamespace, c.namespace)
	}
	if c.stale {
		query.Set(paramBehind, "")
	}
	to := url.URL{Scheme: "http", Host: address, Path: agentsPath, RawQuery: query.Encode()}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, to.String(), http.NoBody)
	if err != nil {
		return fmt.Errorf("--http-addr=%q: %w", c.server.httpAddr, err)
	}
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, ResponseHeaderTimeout: 10 * time.Second}}
	response, err := client.Do(request)
	if failed, ok := errors.AsType[*url.Error](err); ok {
		return fmt.Errorf("no nametap-discovery answers at %s: is it running? --http-addr names another address: %w", address, failed.Err)
	}
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(response.Body, maxLogged)) // the status says enough
		return fmt.Errorf("requesting %s of %s: %s: %s", agentsPath, address, response.Status, strings.TrimSpace(string(why)))
	}
	return c.print(response.Body)
}

// print prints the lines of a response.
func (c *agentsCommand) print(lines io.Reader) error {
	out := bufio.NewWriter(c.stdout)
	columns := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if c.output == outputText {
		fmt.Fprintln(columns, "AGENT\tADDRESS\tVERSION\tMODE\tCONNECTED\tPUSHED\tACKED\tSTATE\tLAST NACK")
	}
	decoder, encoder := json.NewDecoder(lines), json.NewEncoder(out)
	var summary *fleet
	var failure error
	for summary == nil && failure == nil {
		var line listing
		switch failure = decoder.Decode(&line); {
		case failure != nil:
			if errors.Is(failure, io.EOF) { // the last line is missing
				failure = io.ErrUnexpectedEOF
			}
			failure = fmt.Errorf("the list is not complete: %w", failure)
		case line.Summary != nil:
			summary = line.Summary
		case line.Agent == nil:
			failure = errors.New("the reply is not from nametap-discovery")
		case c.output == outputJSON:
			failure = encoder.Encode(line.Agent)
		default:
			fmt.Fprintln(columns, row(line.Agent))
		}
	}
	err := columns.Flush() // print the agents that came, even if more are missing
	if summary != nil && c.output == outputText {
		fmt.Fprintln(out, summary)
	}
	if err = cmp.Or(err, out.Flush()); err != nil {
		return fmt.Errorf("printing agents: %w", err)
	}
	return failure
}

// row returns the line of an agent.
func row(a *push.Agent) string {
	name, nack := "(no request yet)", "-"
	if a.ID != "" {
		name = a.Namespace + "/" + a.Name
	}
	if a.Nack != nil {
		nack = age(&a.Nack.Seconds) + " ago: " + a.Nack.Reason
	}
	address := a.Address
	if of, err := netip.ParseAddrPort(address); err == nil {
		address = of.Addr().Unmap().String()
	}
	cells := []string{name, address, a.Software, a.Mode, age(&a.ConnectedSeconds), age(a.LastPushSeconds), age(a.LastAckSeconds), string(a.State), nack}
	for i, text := range cells {
		cells[i] = clip.Line(cmp.Or(text, "-"))
	}
	return strings.Join(cells, "\t")
}

// age returns how long ago something was, in its largest unit; "-" for never.
func age(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	const day = 24 * time.Hour
	past := time.Duration(*seconds * float64(time.Second))
	switch {
	case past < 2*time.Minute:
		return fmt.Sprintf("%ds", past/time.Second)
	case past < 2*time.Hour:
		return fmt.Sprintf("%dm", past/time.Minute)
	case past < 2*day:
		return fmt.Sprintf("%dh", past/time.Hour)
	}
	return fmt.Sprintf("%dd", past/day)
}

// String returns the last lines of the output.
func (f *fleet) String() string {
	of := "replica " + clip.Line(f.Replica)
	if f.Namespace != "" {
		of += ", namespace " + clip.Line(f.Namespace)
	}
	states := make([]string, 0, len(f.States))
	for _, state := range slices.Sorted(maps.Keys(f.States)) {
		states = append(states, fmt.Sprintf("%d %s", f.States[state], clip.Line(string(state))))
	}
	text := fmt.Sprintf("%s: agents: %d, behind: %d (%s). Other replicas have other agents: ask each.", of, f.Agents, f.Behind, cmp.Or(strings.Join(states, ", "), "none"))
	lines := []string{text}
	for _, why := range f.Hidden {
		lines = append(lines, clip.Line(why))
	}
	return strings.Join(lines, "\n")
}
