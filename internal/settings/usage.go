package settings

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// PrintUsage prints the usage of a command, with its flags in groups. It is for
// cobra.Command.SetUsageFunc; cobra's own function prints one list of flags. A template
// could print groups, too, but text/template makes the linker keep every exported method
// of the program.
func PrintUsage(command *cobra.Command) error {
	var text strings.Builder
	fmt.Fprintf(&text, "Usage:\n  %s\n", command.UseLine())
	if command.HasAvailableSubCommands() {
		fmt.Fprintf(&text, "  %s [command]\n", command.CommandPath())
	}
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
	text.WriteString(Usages(command.LocalFlags()))
	_, err := io.WriteString(command.OutOrStderr(), text.String())
	return err
}
