package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/version"
)

func newVersionCommand() *cobra.Command {
	var output string
	command := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  usageArgs(cobra.NoArgs),
		RunE: func(command *cobra.Command, _ []string) error {
			build := version.Read()
			return printOutput(command.OutOrStdout(), output, build, func(w io.Writer) error {
				_, err := fmt.Fprintf(w, "nametap %s (%s)\n", build, build.Go)
				return err
			})
		},
	}
	declareOutput(command.Flags(), &output)
	return command
}
