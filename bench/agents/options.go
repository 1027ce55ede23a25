package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nametap/nametap/bench/agents/fleet"
	"github.com/nametap/nametap/bench/agents/wire"
)

// options are the command line.
type options struct {
	agents, hosts, namespaces int
	full                      int
	mode                      fleet.Mode
	variant                   wire.Variant
	tls, estimate             bool
	replicas                  int
	binary                    string

	run        []string
	repeats    int
	churn      float64 // hosts a minute, of all
	rate       float64 // edits a second of -run=day
	lasts      time.Duration
	slow       float64 // share of agents
	limit      time.Duration
	targets    []target
	api, token string
	json       string
	progress   io.Writer
}

// A target is a control plane that runs already.
type target struct {
	name, addr string
	pid        int
	mode       fleet.Mode
}

// ofAgent is the name of an experiment that needs dnsperf, and that -run=all leaves out.
const ofAgent = "agent"

// experiments are the names of the experiments, in their order.
func experiments() []string {
	return []string{"push", "churn", "reconnect", "slow", "list", "replicas", "day"}
}

// parseOptions reads the command line. Help is printed to w.
func parseOptions(argv []string, w io.Writer) (options, error) {
	o := options{progress: w}
	var mode, variant, run string
	flags := flag.NewFlagSet("agents", flag.ContinueOnError)
	flags.SetOutput(w)
	flags.IntVar(&o.agents, "agents", 1000, "number of agents")
	flags.IntVar(&o.hosts, "hosts", 10_000, "number of Services")
	flags.IntVar(&o.namespaces, "namespaces", 1, "namespaces that the Services and the agents are in")
	flags.IntVar(&o.full, "full", 100, "agents that verify the versions of all resources")
	flags.StringVar(&mode, "mode", string(fleet.Named), "what agents ask for: named (a resource for each shard) or plain (one whole table)")
	flags.StringVar(&variant, "variant", "delta", "variant of ADS: delta or sotw")
	flags.BoolVar(&o.tls, "tls", false, "connect over TLS, with a certificate for each namespace")
	flags.BoolVar(&o.estimate, "estimate-bandwidth", false, "send a PING for each push, as grpc-go does unless its windows are configured")
	flags.IntVar(&o.replicas, "replicas", 1, "replicas of nametap-discovery; at least 2 in the experiments replicas and day")
	flags.StringVar(&o.binary, "discovery", "", "nametap-discovery binary (default: built from ..)")
	flags.StringVar(&run, "run", "push", "experiments, with commas: "+strings.Join(experiments(), ",")+", all of these or agent")
	flags.IntVar(&o.repeats, "repeats", 20, "edits of the experiment push, and reconnects")
	flags.Float64Var(&o.churn, "churn", 0.01, "share of the hosts that the experiment churn edits in a minute")
	flags.Float64Var(&o.rate, "rate", 50, "edits a second of the experiment day")
	flags.DurationVar(&o.lasts, "for", time.Minute, "length of the experiments churn, replicas and day")
	flags.Float64Var(&o.slow, "slow", 0.1, "share of the agents that stop reading in the experiment slow")
	flags.DurationVar(&o.limit, "limit", 2*time.Minute, "how long to wait for a push to all agents")
	flags.StringVar(&o.api, "api", "", "edit objects of the API server at this URL; with -target")
	flags.StringVar(&o.token, "token", "", "for -api")
	flags.StringVar(&o.json, "json", "", "write all figures to this file")
	flags.Func("target", "measure a control plane that runs already: NAME,ADDRESS:PORT,PID,MODE; may be repeated; needs -api", o.addTarget)
	if err := flags.Parse(argv); err != nil {
		return o, err
	}
	o.mode, o.run = fleet.Mode(mode), strings.Split(run, ",")
	if run == "all" {
		o.run = experiments()
	}
	switch variant {
	case "delta":
	case "sotw":
		o.variant = wire.StateOfTheWorld
	default:
		return o, fmt.Errorf("-variant %q: want delta or sotw", variant)
	}
	return o, o.check(flags.Args())
}

// addTarget reads a value of -target.
func (o *options) addTarget(text string) error {
	parts := strings.Split(text, ",")
	if len(parts) != 4 {
		return errors.New("want NAME,ADDRESS:PORT,PID,MODE")
	}
	pid, err := strconv.Atoi(parts[2])
	if err != nil {
		return fmt.Errorf("%q: want the number of a process", parts[2])
	}
	o.targets = append(o.targets, target{parts[0], parts[1], pid, fleet.Mode(parts[3])})
	return nil
}

// check returns an error if the command line is wrong.
func (o options) check(rest []string) error {
	if len(rest) > 0 {
		return fmt.Errorf("unexpected %q", rest[0])
	}
	if min(o.agents, o.hosts, o.namespaces, o.replicas, o.repeats) < 1 || o.full < 0 {
		return errors.New("-agents, -hosts, -namespaces, -replicas, -repeats: want more than 0")
	}
	if o.hosts > 1<<24 {
		return fmt.Errorf("-hosts: want %d at most", 1<<24)
	}
	modes := []fleet.Mode{o.mode}
	for _, t := range o.targets {
		modes = append(modes, t.mode)
	}
	for _, mode := range modes {
		if !slices.Contains([]fleet.Mode{fleet.Named, fleet.Plain}, mode) {
			return fmt.Errorf("mode %q: want named or plain", mode)
		}
	}
	for _, name := range o.run {
		if known := append(experiments(), ofAgent); !slices.Contains(known, name) {
			return fmt.Errorf("-run %q: want some of %s", name, strings.Join(known, ", "))
		}
		if name == ofAgent && o.tls {
			return errors.New("-run agent: want no -tls")
		}
		if len(o.targets) > 0 && !slices.Contains([]string{"push", "reconnect"}, name) {
			return fmt.Errorf("-target: want -run push or reconnect, not %s", name)
		}
	}
	if (len(o.targets) > 0) != (o.api != "") {
		return errors.New("-target and -api: want both or none")
	}
	return nil
}

// replicasOf returns how many replicas an experiment needs.
func (o options) replicasOf(experiment string) int {
	if experiment == "replicas" || experiment == "day" {
		return max(2, o.replicas)
	}
	return o.replicas
}
