package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/agent/resolved"
)

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
