package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/fleetpage"
)

const (
	// parallel is how many agents are asked at a time.
	parallel = 50
	// minPause and maxParts bound how often the agents are read: the curve has up to maxParts parts.
	minPause = 2 * time.Second
	maxParts = 60

	outputTable, outputJSON, outputHTML = "table", "json", "html" // the values of --output
)

// A fleet is one run of the command fleet.
type fleet struct {
	request
	selector, output string
	problems         bool
	window           time.Duration

	cluster *cluster
}

const fleetHelp = `Show all agents of the cluster, with any control plane, and which has a problem.

Usage:
  kubectl nametap fleet [-n NAMESPACE] [-l SELECTOR] [--problems] [--output table|json|html]

The plugin finds the pods with the agent and reads their metrics through the API server, 50 at a time. This needs the rights to
list pods and to get pods/proxy.

The exit code is 0 if all agents are ok, 1 if one has a problem or does not reply, 3 with warnings only.

Flags:
  -n, --namespace NS
`

// run runs the command, and returns the exit code.
func (f *fleet) run(args []string, stdout io.Writer) (int, error) {
	flags := f.flags()
	switch err := flags.Parse(args); {
	case errors.Is(err, pflag.ErrHelp):
		_, err := io.WriteString(stdout, fleetHelp+flags.FlagUsages())
		return 0, err
	case err != nil:
		return exitUsage, err
	case flags.NArg() > 0:
		return exitUsage, fmt.Errorf("%q: fleet has no argument; -n names a namespace and -l selects pods by labels", flags.Arg(0))
	case !slices.Contains([]string{outputTable, outputJSON, outputHTML}, f.output):
		return exitUsage, fmt.Errorf("--output=%q: want %s, %s or %s", f.output, outputTable, outputJSON, outputHTML)
	case f.window < 0:
		return exitUsage, errors.New("--for: want a time such as 30s")
	}
	if all, _ := flags.GetBool("all-namespaces"); all && flags.Changed("all-namespaces") { // as with kubectl, -A wins over -n
		f.namespace = ""
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	agents, err := f.read(ctx)
	if err != nil {
		return exitFailed, err
	}
	return exitCode(agents), f.print(stdout, agents)
}

// flags returns the flags of the command, except for those that all commands have.
func (f *fleet) flags() *pflag.FlagSet {
	flags := pflag.NewFlagSet("fleet", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {}
	flags.BoolP("all-namespaces", "A", true, "all namespaces, as without -n")
	flags.StringVarP(&f.selector, "selector", "l", "", "only pods with these labels: a `selector` as for kubectl get")
	flags.BoolVar(&f.problems, "problems", false, "only agents that are not ok")
	flags.StringVarP(&f.output, "output", "o", outputTable, "`format`: table, json with an agent in each line, or html, a page for a browser")
	flags.DurationVar(&f.window, "for", 0, "count queries for this `duration`, and not since the start of each agent")
	return flags
}

// exitCode returns the exit code for agents, as `nametap doctor` has it for one.
func exitCode(agents []*agent) (code int) {
	const exitWarnings = 3
	for _, a := range agents {
		switch a.State {
		case broken, unknown:
			return exitFailed
		case warning:
			code = exitWarnings
		}
	}
	return code
}

// read finds the agents, and reads their state again and again in the time of --for.
func (f *fleet) read(ctx context.Context) ([]*agent, error) {
	var err error
	if f.cluster, err = openCluster(ctx, f.kubectl); err != nil {
		return nil, err
	}
	defer f.cluster.close()
	var agents []*agent
	container := cmp.Or(f.container, agentContainer)
	err = f.cluster.pods(ctx, f.namespace, f.selector, func(p *corev1.Pod) {
		if a := newAgent(p, container); a != nil {
			agents = append(agents, a)
		}
	})
	if err == nil && len(agents) == 0 {
		err = fmt.Errorf("no pod has the agent: want pods with the annotation %s, or with a container %s", annotation, container)
	}
	if err != nil {
		return nil, err
	}
	end := time.Now().Add(f.window)
	for last := f.window == 0; ; last = !time.Now().Before(end) {
		var group errgroup.Group
		group.SetLimit(parallel)
		for _, a := range agents {
			group.Go(func() error { a.read(ctx, f.cluster); return nil })
		}
		_ = group.Wait() // the functions return no error
		agents = slices.DeleteFunc(agents, func(a *agent) bool { return a.gone })
		if last || ctx.Err() != nil {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(min(max(minPause, f.window/maxParts), time.Until(end))):
		}
	}
	return agents, ctx.Err()
}

// print prints the agents; with --problems only those with one.
func (f *fleet) print(w io.Writer, agents []*agent) error {
	shown := agents
	if f.problems {
		shown = slices.DeleteFunc(slices.Clone(agents), func(a *agent) bool { return a.State == ok || a.State == starting })
	}
	if f.output == outputTable {
		return printTable(w, agents, shown)
	}
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines) // it escapes <, so the lines can be a part of the page
	for _, a := range shown {
		_ = encoder.Encode(a) // JSON has all of these values
	}
	out := lines.Bytes()
	if f.output == outputHTML {
		out = fleetpage.With(out, time.Now())
	}
	_, err := w.Write(out)
	return err
}

// printTable prints a row for each agent in shown, and then what is wrong with all agents: a line for each cause, and how many
// agents are in each state.
func printTable(w io.Writer, agents, shown []*agent) error {
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(shown) > 0 {
		fmt.Fprintln(out, "NAMESPACE\tPOD\tVERSION\tTABLE\tAGE\tHOSTS\tQUERIES\tFAILED\tSTATE\tPROBLEM")
	}
	for _, a := range shown {
		fmt.Fprintln(out, strings.Join(a.row(), "\t"))
	}
	if err := out.Flush(); err != nil {
		return err
	}
	states, namespaces := map[state]int{}, map[string]int{}
	for _, a := range agents {
		states[a.State]++
		namespaces[a.Namespace]++
	}
	var text strings.Builder
	for _, c := range causes(agents) {
		fmt.Fprintln(&text, clip.Line(c.text(namespaces)))
	}
	var sums []string
	for _, s := range []state{ok, starting, warning, unknown, broken} {
		if states[s] > 0 {
			sums = append(sums, fmt.Sprintf("%d %s", states[s], s))
		}
	}
	_, err := fmt.Fprintf(w, "%sagents: %d (%s)\n", text.String(), len(agents), strings.Join(sums, ", "))
	return err
}

// row returns the cells of the agent.
func (a *agent) row() []string {
	cells := []string{a.Namespace, a.Name, a.Version, "", "", ""}
	if a.Table != nil {
		cells[3], cells[4], cells[5] = a.Table.Digest, duration.HumanDuration(time.Duration(a.Table.Age)*time.Second), strconv.Itoa(a.Table.Hosts)
	}
	counted := a.counts
	if a.Recent != nil {
		counted = a.Recent.counts
	}
	share := ""
	if counted.Queries > 0 {
		share = fmt.Sprintf("%.1f%%", 100*float64(counted.Failures)/float64(counted.Queries))
	}
	cells = append(cells, strconv.FormatInt(counted.Queries, 10), share, string(a.State), "")
	if len(a.Problems) > 0 {
		cells[len(cells)-1] = a.Problems[0].What
	}
	for i, text := range cells {
		cells[i] = clip.Line(cmp.Or(text, "-"))
	}
	return cells
}

// A cause is one kind of problem.
type cause struct {
	code, example string
	agents        map[string]int // how many agents have it, by namespace
	count         int
}

// causes returns the causes: those that most agents have come last, where a terminal shows them.
func causes(agents []*agent) []*cause {
	byCode := map[string]*cause{}
	for _, a := range agents {
		seen := map[string]bool{}
		for _, p := range a.Problems {
			c := byCode[p.Code]
			if c == nil {
				c = &cause{code: p.Code, example: p.What, agents: map[string]int{}}
				byCode[p.Code] = c
			}
			if !seen[p.Code] { // not the same of another nameserver
				c.agents[a.Namespace]++
				c.count++
			}
			seen[p.Code] = true
		}
	}
	return slices.SortedFunc(maps.Values(byCode), func(a, b *cause) int {
		return cmp.Or(cmp.Compare(a.count, b.count), cmp.Compare(a.code, b.code))
	})
}

// text returns a line about the cause, with the namespaces in which most agents have it. total has the number of agents by
// namespace.
func (c *cause) text(total map[string]int) string {
	const most = 5
	names := slices.SortedFunc(maps.Keys(c.agents), func(a, b string) int {
		return cmp.Or(cmp.Compare(c.agents[b], c.agents[a]), cmp.Compare(a, b))
	})
	var places []string
	for _, name := range names[:min(most, len(names))] {
		places = append(places, fmt.Sprintf("%s %d of %d", name, c.agents[name], total[name]))
	}
	if len(names) > most {
		places = append(places, fmt.Sprintf("%d more namespaces", len(names)-most))
	}
	return fmt.Sprintf("%s (%s): %s", c.code, strings.Join(places, ", "), c.example)
}
