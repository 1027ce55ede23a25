package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
)

// options are the command line.
type options struct {
	hosts, rounds, seconds int
	// peers are names; nil means all.
	peers          []string
	agent          string
	json, svg, md  string
	push, pushOnly bool
	pushHosts      int
}

// parseOptions reads the command line. Help is printed to w.
func parseOptions(argv []string, w io.Writer) (options, error) {
	var o options
	var peers string
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(w)
	flags.IntVar(&o.hosts, "hosts", 10_000, "hosts that every server is given")
	flags.IntVar(&o.rounds, "rounds", 5, "rounds; in each one every server is measured once")
	flags.IntVar(&o.seconds, "seconds", 2, "length of one run")
	flags.StringVar(&peers, "peers", "all", "servers to measure, with commas: "+strings.Join(peerNames(), ","))
	flags.StringVar(&o.agent, "agent", "", "nametap binary (default: built from ..)")
	flags.StringVar(&o.json, "json", "", "write all figures to this file")
	flags.StringVar(&o.svg, "svg", "", "write a chart to this file")
	flags.StringVar(&o.md, "md", "", "write the tables as Markdown to this file")
	flags.BoolVar(&o.push, "push", false, "also measure what pushes cost")
	flags.BoolVar(&o.pushOnly, "push-only", false, "measure only what pushes cost")
	flags.IntVar(&o.pushHosts, "push-hosts", 100_000, "hosts of each push")
	if err := flags.Parse(argv); err != nil {
		return o, err
	}
	if peers != "all" {
		o.peers = strings.Split(peers, ",")
	}
	return o, o.check(flags.Args())
}

// check says what is wrong with the command line.
func (o options) check(rest []string) error {
	if len(rest) > 0 {
		return fmt.Errorf("unexpected %q", rest[0])
	}
	if o.hosts < 1 || o.rounds < 1 || o.seconds < 1 || o.pushHosts < 1 {
		return errors.New("-hosts, -rounds, -seconds, -push-hosts: want more than 0")
	}
	// Addresses are four apart, in 10.0.0.0/8.
	if o.hosts > 1_000_000 || o.pushHosts > 1_000_000 {
		return errors.New("-hosts, -push-hosts: want 1000000 at most")
	}
	for _, name := range o.peers {
		if !slices.Contains(peerNames(), name) {
			return fmt.Errorf("-peers: no server %q; there are %s", name, strings.Join(peerNames(), ", "))
		}
	}
	return nil
}

// wants says whether the server is to be measured. The echo always is: the others
// are compared with it.
func (o options) wants(peer string) bool {
	return o.peers == nil || slices.Contains(o.peers, peer) || peer == echoName
}
