// Command agents measures nametap-discovery with many simulated agents, which it plays itself, and
// compares it with other control planes. README.md in the directory above explains how to run it, and
// what its figures mean.
//
//   - stage.go, server.go: the control planes under test, and the agents that are connected to them;
//   - push.go, reconnect.go, list.go, replicas.go, realagent.go: the experiments;
//   - verify.go: whether all agents have the server's table;
//   - remote.go: edits at a real API server;
//   - report.go: figures and tables.
//
// The agents are in package fleet, their streams in package stream and the messages in package wire.
// The objects, with the API server that serves them, are in package cluster.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/nametap/nametap/bench/agents/cluster"
	"github.com/nametap/nametap/bench/lab"
)

func main() {
	o, err := parseOptions(os.Args[1:], os.Stderr)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "agents:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err = run(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "agents:", err)
		os.Exit(1)
	}
}

// memoryLimit is the memory in bytes beyond which the client collects garbage more often.
const memoryLimit = 2 << 30

// run runs the experiments that o selects, and prints their figures.
func run(ctx context.Context, o options) (err error) {
	if err := raiseLimit(o.agents + 500); err != nil {
		return err
	}
	// Less collection of garbage leaves more of the processors to the servers.
	debug.SetGCPercent(200)
	debug.SetMemoryLimit(memoryLimit)
	dir, err := os.MkdirTemp("", "nametap-agents-")
	if err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	b := &bench{options: o, lab: &lab.Lab{Dir: dir, Binaries: dir}, report: newReport(o)}
	defer func() { err = errors.Join(err, b.lab.Close()) }()
	if len(o.targets) > 0 {
		err = b.measureTargets(ctx)
	} else {
		err = b.measureOwn(ctx)
	}
	return errors.Join(err, b.report.print(o))
}

// A bench is one run.
type bench struct {
	options

	lab          *lab.Lab
	report       *reported
	cluster      *cluster.Cluster
	certificates *certificates // nil without TLS
}

// measureOwn measures nametap-discovery, whose objects come from an API server in this process.
func (b *bench) measureOwn(ctx context.Context) error {
	b.cluster = cluster.New(b.hosts, b.namespaces)
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp4", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("listening for control planes: %w", err)
	}
	defer listener.Close() // which ends Serve
	go func() { _ = b.cluster.Serve(listener) }()
	if err := cluster.WriteKubeconfig(b.lab.Path("kubeconfig"), listener.Addr().String()); err != nil {
		return err
	}
	if b.tls {
		if b.certificates, err = newCertificates(b.lab.Dir, b.cluster.Namespaces()); err != nil {
			return err
		}
	}
	var s *stage
	defer func() {
		if s != nil {
			s.stop()
		}
	}()
	for _, name := range b.run {
		if s != nil && len(s.servers) != b.replicasOf(name) {
			s.stop()
			s = nil
		}
		if s == nil {
			if s, err = b.stage(ctx, b.replicasOf(name)); err != nil {
				return err
			}
		}
		if err := s.experiment(ctx, name); err != nil {
			return fmt.Errorf("%s: %w", name, errors.Join(err, s.alive()))
		}
	}
	return nil
}

// measureTargets measures control planes that run already, one after the other.
func (b *bench) measureTargets(ctx context.Context) error {
	for _, t := range b.targets {
		s, err := b.targetStage(ctx, t)
		if err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
		for _, name := range b.run {
			if err = s.experiment(ctx, name); err != nil {
				break
			}
		}
		s.stop()
		if err != nil {
			return fmt.Errorf("%s: %w", t.name, err)
		}
	}
	return nil
}

// raiseLimit lets the process, and processes that it starts, have n open files.
func raiseLimit(n int) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("reading the limit of open files: %w", err)
	}
	limit.Max = max(limit.Max, uint64(n))
	if limit.Cur = limit.Max; syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit) == nil {
		return nil
	}
	return fmt.Errorf("%d open files are needed: raise the limit (ulimit -Hn), or run as root", n)
}

// progressf tells what is being done.
func (b *bench) progressf(format string, args ...any) {
	fmt.Fprintf(b.progress, "%s %s\n", time.Now().Format(time.TimeOnly), fmt.Sprintf(format, args...))
}
