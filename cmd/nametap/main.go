// Command nametap gives one pod or one VM the DNS of its mesh.
//
//	nametap agent     answer queries from a control plane's table
//	nametap capture   install, remove or check the rules that redirect port 53 to the agent
//	nametap query     query the agent, and show the answer and the rule that gave it
//	nametap table     show the agent's table of mesh names
//	nametap cache     show the replies that the agent keeps, or flush them
//	nametap tail      show the queries that fail, and all others as they are answered
//	nametap top       show which names, clients, nameservers or response codes have most queries
//	nametap explain   explain a row, a problem or an error code that nametap prints
//	nametap status    show the agent's connection, table, nameservers and capture
//	nametap doctor    show what is wrong, why, and what ends it
//	nametap guard     learn, check and show which names clients may ask for and reach
//	nametap inject    add the agent to the pods of a manifest
//	nametap version
//
// Exit codes: 0 done, 1 failed, 2 wrong usage; of nametap doctor, 3 only warnings.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent/resolved"
	"github.com/nametap/nametap/internal/settings"
	"github.com/nametap/nametap/internal/version"
)

// runProgram executes one command line and returns the exit code. The first SIGINT, SIGTERM or
// SIGHUP cancels the context of the command; a second one ends the process, unless the
// command handles it.
func runProgram(args []string) int {
	withoutPipeSignal()
	ctx, stop := signal.NotifyContext(context.Background(), endSignals()...)
	defer stop()
	context.AfterFunc(ctx, stop)
	root := newRootCommand()
	root.SetArgs(args)
	command, err := root.ExecuteContextC(ctx)
	code := exitCode(err)
	if code == 0 || errors.As(err, new(exitError)) || outputClosed(err) {
		return code
	}
	message := fmt.Sprintf("%s: %v\n", command.CommandPath(), err)
	if code == exitUsage {
		message += fmt.Sprintf("`%s --help` shows the usage\n", command.CommandPath())
	}
	printError(os.Stderr, message)
	return code
}

// exitCode returns the exit code of a command that has ended with an error, or with nil.
func exitCode(err error) int {
	var code exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, new(usageError)):
		return exitUsage
	}
	return exitFailed
}

// outputClosed reports whether err means that the reader of the standard output has closed
// it, as `head` does. Then there is no message.
func outputClosed(err error) bool {
	path := new(fs.PathError)
	return errors.As(err, &path) && path.Path == os.Stdout.Name() && errors.Is(err, syscall.EPIPE)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "nametap",
		Short:         "DNS of the mesh for one pod or one VM",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			return command.Help()
		},
	}
	root.SetFlagErrorFunc(func(command *cobra.Command, err error) error {
		return usageError{settings.FlagError(command, err)}
	})
	root.SetUsageFunc(settings.PrintUsage)
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(
		newAgentCommand(), newCaptureCommand(), newQueryCommand(), newTableCommand(), newCacheCommand(), newTailCommand(),
		newTopCommand(), newStatusCommand(), newDoctorCommand(), newExplainCommand(), newInjectCommand(),
		newGuardCommand(), newVersionCommand(), newResolvedHelperCommand(),
	)
	return root
}

func newVersionCommand() *cobra.Command {
	var output outputFormat
	command := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			build := version.Read()
			return output.print(command.OutOrStdout(), build, func(w io.Writer) {
				fmt.Fprintf(w, "nametap %s (%s)\n", build, build.Toolchain())
			})
		},
	}
	output.declare(command.Flags())
	return command
}

// newResolvedHelperCommand returns the command that nametap-resolved@.service runs as root.
func newResolvedHelperCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "resolved-helper",
		Short:  "Register an agent with systemd-resolved; for nametap-resolved.socket",
		Hidden: true,
		Args:   usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			return resolved.Help(command.Context(), os.Stdin, os.Stdout)
		},
	}
}

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

// A usageError means wrong arguments or settings. It ends the command with exitUsage.
type usageError struct{ error }

// Unwrap returns the wrapped error.
func (e usageError) Unwrap() error { return e.error }

// usageArgs returns a function that is like check, but whose errors are usage errors.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(command *cobra.Command, args []string) error {
		if err := check(command, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// An exitError ends the command with a code and without a message.
type exitError int

// Error returns the code.
func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }
