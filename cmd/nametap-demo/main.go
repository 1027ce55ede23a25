// Command nametap-demo shows what nametap does. It runs a control plane with a copy of the example shop, an agent, and a
// nameserver that the agent forwards to, all in one process and on loopback. Then it sends queries to the agent and shows
// the answers.
//
// To show capture, the program runs itself again in a network namespace, as `nametap-demo captured`. There the program
// nametap, which is built beside this program, installs the rules, and `nametap-demo client` is the client.
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

const exitFailed, exitUsage = 1, 2 // exit codes

func main() { os.Exit(run()) }

// run does the work of main and returns the exit code, so that test scripts can call it.
func run() int {
	flags := flag.NewFlagSet("nametap-demo", flag.ContinueOnError)
	once := flags.Bool("once", false, "end after the tour")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return exitUsage // Parse has printed why
	}
	command := flags.Arg(0)
	if part := command == capturedCommand || command == clientCommand; flags.NArg() > 0 && (!part || flags.NArg() != 2) {
		fmt.Fprintf(os.Stderr, "nametap-demo: argument %q: want none\n", command)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	var err error
	switch out := newPrinter(os.Stdout); command {
	case capturedCommand:
		err = runCaptured(ctx, out, flags.Arg(1))
	case clientCommand:
		err = runClient(ctx, flags.Arg(1))
	default:
		err = runDemo(ctx, out, *once)
	}
	if err != nil && ctx.Err() == nil { // a signal causes errors, too
		fmt.Fprintf(os.Stderr, "nametap-demo: %v\n", err)
		return exitFailed
	}
	return 0
}
