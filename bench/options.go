package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/nametap/nametap/bench/lab"
)

// options are the command line.
type options struct {
	hosts, rounds, seconds int
	// peers are names; nil means all.
	peers          []string
	agent, svg     string
	push, pushOnly bool
	pushHosts      int
	// The experiments in namespaces. Each replaces the comparison.
	forward, faults, capture bool
	// inside is the directory with the binaries if this process is in the namespaces of the experiments. Otherwise it
	// is empty.
	inside string
}

// parseOptions reads the command line. Help is printed to w.
func parseOptions(argv []string, w io.Writer) (options, error) {
	var o options
	var peers string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(w)
	flags.IntVar(&o.hosts, "hosts", 10_000, "hosts of every server")
	flags.IntVar(&o.rounds, "rounds", 5, "rounds; each round measures every server once")
	flags.IntVar(&o.seconds, "seconds", 2, "length of one run")
	flags.StringVar(&peers, "peers", "all", "servers to measure, with commas: "+strings.Join(lab.PeerNames(), ","))
	flags.StringVar(&o.agent, "agent", "", "nametap binary (default: built from ..)")
	flags.StringVar(&o.svg, "svg", "", "write a chart to this file")
	flags.BoolVar(&o.push, "push", false, "also measure the cost of pushes, and memory")
	flags.BoolVar(&o.pushOnly, "push-only", false, "measure only the cost of pushes, and memory")
	flags.IntVar(&o.pushHosts, "push-hosts", 100_000, "hosts of each push")
	flags.BoolVar(&o.forward, "forward", false, "measure the cost of a cache miss and of a cache hit")
	flags.BoolVar(&o.faults, "faults", false, "measure latencies while nameservers are silent or lose packets")
	flags.BoolVar(&o.capture, "capture", false, "measure the cost of capture")
	flags.StringVar(&o.inside, insideFlag, "", "set by bench itself: run in namespaces, with the binaries in this directory")
	if err := flags.Parse(argv); err != nil {
		return o, err
	}
	if peers != "all" {
		o.peers = strings.Split(peers, ",")
	}
	return o, o.check(flags.Args())
}

// check returns an error if the command line is wrong.
func (o options) check(rest []string) error {
	if len(rest) > 0 {
		return fmt.Errorf("unexpected %q", rest[0])
	}
	if min(o.hosts, o.rounds, o.seconds, o.pushHosts) < 1 {
		return errors.New("-hosts, -rounds, -seconds, -push-hosts: want more than 0")
	}
	if o.experiments() && (o.push || o.pushOnly) {
		return errors.New("-push, -push-only: not together with experiments")
	}
	// Addresses are four apart, in 10.0.0.0/8.
	if o.hosts > 1_000_000 || o.pushHosts > 1_000_000 {
		return errors.New("-hosts, -push-hosts: want 1000000 at most")
	}
	for _, name := range o.peers {
		if !slices.Contains(lab.PeerNames(), name) {
			return fmt.Errorf("-peers: unknown server %q; want some of %s", name, strings.Join(lab.PeerNames(), ", "))
		}
	}
	return nil
}

// insideFlag is the flag of the bench process in the namespaces.
const insideFlag = "inside"

// experiments reports whether an experiment is selected.
func (o options) experiments() bool { return o.forward || o.faults || o.capture }

// wants reports whether a server is selected. The echo is always selected, because the
// other servers are compared with it.
func (o options) wants(peer string) bool {
	return o.peers == nil || slices.Contains(o.peers, peer) || peer == lab.EchoName
}
