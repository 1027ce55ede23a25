// Command nametap-demo shows what nametap does. It runs a control plane with a copy of the
// example shop, an agent, and a nameserver that the agent forwards to, all in one process and
// on loopback. Then it sends queries to the agent and shows the answers. It needs no root.
//
// Connections to automatic VIPs need capture rules. To show such connections, the program runs itself again,
// as `nametap-demo vips`, in a user namespace and a network namespace that end with that process.
//
// Exit codes: 0 done, 1 failed, 2 wrong usage.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() { os.Exit(run()) }

// run does the work of main and returns the exit code, so that test scripts can call it.
func run() int {
	flags := flag.NewFlagSet("nametap-demo", flag.ContinueOnError)
	once := flags.Bool("once", false, "end after the tour")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return exitUsage // Parse has printed why
	}
	vips := flags.NArg() == 2 && flags.Arg(0) == vipsCommand
	if flags.NArg() > 0 && !vips {
		fmt.Fprintf(os.Stderr, "nametap-demo: argument %q: want none\n", flags.Arg(0))
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	var err error
	if out := newPrinter(os.Stdout); vips {
		err = runVIPs(ctx, out, flags.Arg(1))
	} else {
		err = runDemo(ctx, out, *once)
	}
	if err != nil && ctx.Err() == nil { // a signal causes errors, too
		fmt.Fprintf(os.Stderr, "nametap-demo: %v\n", err)
		return exitFailed
	}
	return 0
}
