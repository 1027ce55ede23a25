package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

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
