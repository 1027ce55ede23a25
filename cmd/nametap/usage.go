package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/settings"
)

// printUsage prints how a command is used, with its flags in groups. It replaces cobra's
// own function, which has one list of flags. A template would do so too, but text/template
// makes the linker keep every exported method of the program.
func printUsage(command *cobra.Command) error {
	var text strings.Builder
	fmt.Fprintf(&text, "Usage:\n  %s\n", command.UseLine())
	if command.HasExample() {
		fmt.Fprintf(&text, "\nExamples:\n%s\n", command.Example)
	}
	if command.HasAvailableSubCommands() {
		text.WriteString("\nCommands:\n")
	}
	for _, sub := range command.Commands() {
		if sub.IsAvailableCommand() {
			fmt.Fprintf(&text, "  %-*s %s\n", sub.NamePadding(), sub.Name(), sub.Short)
		}
	}
	text.WriteString(settings.Usages(command.LocalFlags()))
	_, err := io.WriteString(command.OutOrStderr(), text.String())
	return err
}
