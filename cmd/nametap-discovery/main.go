// Command nametap-discovery is nametap's own control plane: it serves the
// Services and ServiceEntries of a directory to agents, as istiod would.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() { os.Exit(run()) }

// run is main without the exit, so that scripts in tests can call it.
func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	return execute(ctx, os.Args[1:], os.Stdout, os.Stderr)
}
