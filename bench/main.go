// Command bench measures what an answer of the agent costs, and compares it with other
// servers that answer the same names. README.md explains the method and each figure.
//
// This package has the measurements and their tables. Package lab has the tools of
// measurements, and package report has figures, tables and charts.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/nametap/nametap/bench/lab"
)

func main() {
	o, err := parseOptions(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	if o.experiments() && o.inside == "" {
		err = enter(ctx, o, os.Args[1:])
	} else {
		err = measure(ctx, o)
	}
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// measure runs the measurements that o selects.
func measure(ctx context.Context, o options) (err error) {
	if err := requirements(&o); err != nil {
		return err
	}
	r := newResults(o)
	if o.experiments() {
		if err := experiment(ctx, o, r); err != nil {
			return err
		}
		return printReport(o, r)
	}
	if !o.pushOnly {
		if err := measureServers(ctx, o, r); err != nil {
			return err
		}
	}
	if o.push || o.pushOnly {
		if err := measurePushes(ctx, o, r); err != nil {
			return err
		}
	}
	return printReport(o, r)
}

// requirements returns an error if a tool is missing.
func requirements(o *options) error {
	if runtime.NumCPU() < 2 {
		return errors.New("two processors are needed, one for the server and one for dnsperf")
	}
	if o.capture && os.Getuid() != 0 {
		return errors.New("-capture: want root, so that agent and client are different users")
	}
	for _, tool := range []string{"dnsperf", "taskset", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%s is needed; on Debian: apt-get install dnsperf util-linux, and Go: %w", tool, err)
		}
	}
	if _, err := os.Stat("ads/main.go"); err != nil {
		return fmt.Errorf("the working directory must be bench/: %w", err)
	}
	if o.agent == "" {
		return nil
	}
	path, err := filepath.Abs(o.agent)
	if err != nil {
		return fmt.Errorf("looking for the agent %q: %w", o.agent, err)
	}
	o.agent = path
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("looking for the agent: %w", err)
	}
	return nil
}

// measureServers compares the servers in a new lab.
func measureServers(ctx context.Context, o options, r *results) (err error) {
	l, err := lab.NewLab(o.hosts, o.agent, o.inside)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	b := &bench{options: o, lab: l, results: r, progress: os.Stderr}
	if err := b.startServers(ctx); err != nil {
		return err
	}
	if err := b.runRounds(ctx); err != nil {
		return err
	}
	r.compare()
	return nil
}

// printReport prints the tables, and writes the chart.
func printReport(o options, r *results) error {
	fmt.Print(r.text())
	if o.svg == "" {
		return nil
	}
	if err := os.WriteFile(o.svg, []byte(r.chart()), 0o644); err != nil { // readable for every user
		return fmt.Errorf("writing the chart: %w", err)
	}
	return nil
}
