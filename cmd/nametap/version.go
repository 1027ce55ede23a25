package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/version"
)

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
