//go:build !manual

// Command nametap-discovery is nametap's own control plane. It serves the Services and
// ServiceEntries of a Kubernetes cluster, or of a directory, to agents, as istiod does.
package main

import (
	"context"
	"os"
	"os/signal"
)

func main() { os.Exit(run()) }

// run runs the command and returns the exit code.
func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), endSignals()...)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	return execute(ctx, os.Args, os.Stdout, os.Stderr)
}
