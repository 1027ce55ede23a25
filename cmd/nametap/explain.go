package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/explain"
	"github.com/nametap/nametap/internal/version"
)

const (
	// maxExplained is how many of the matching entries are printed.
	maxExplained = 10
	// explainWidth is the width of a printed line.
	explainWidth = 100
)

func newExplainCommand() *cobra.Command {
	var output outputFormat
	command := &cobra.Command{
		Use:   "explain ROW|CODE|TEXT",
		Short: "Explain a row, an error code or a message that nametap prints",
		Long: `Print what the documents of this version say about a row of docs/behaviour.md such as N9,
a problem such as nameserver_down, an Extended DNS Error such as 22, or a message. A text that
is no message is looked for as words. This needs no network and no agent.

The exit code is 1 if the documents say nothing about it.`,
		Example: `  nametap explain N9
  nametap explain nameserver_down
  nametap explain 22
  nametap explain no nameserver to ask`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			all, err := explain.Entries()
			if err != nil {
				return err
			}
			found := explain.Find(all, args)
			if len(found) == 0 {
				return fmt.Errorf("the documents of version %s say nothing about %q: want a row such as N9, a code such as 22 or nameserver_down, "+
					"or a message or words in it",
					version.String(), strings.Join(args, " "))
			}
			return output.print(command.OutOrStdout(), found, func(w io.Writer) { printExplained(w, found) })
		},
	}
	output.declare(command.Flags())
	return command
}

func printExplained(w io.Writer, entries []explain.Entry) {
	for i, e := range entries {
		if i > 0 {
			fmt.Fprintln(w)
		}
		if i == maxExplained {
			fmt.Fprintf(w, "and %d more: use more words\n", len(entries)-i)
			break
		}
		switch e.Kind {
		case explain.Row:
			wrap(w, "", fmt.Sprintf("%s (%s): %s", e.ID, e.Section, e.Text))
		case explain.Code:
			wrap(w, "", fmt.Sprintf("Extended DNS Error %s, %s: %s", e.ID, e.Title, e.Text))
		case explain.Problem:
			wrap(w, "", "problem "+e.ID+": "+e.Text)
		case explain.Symptom:
			wrap(w, "", e.Title+":")
			wrap(w, "  ", e.Text)
		}
		if e.Why != "" {
			label := "why: "
			if e.Kind == explain.Problem {
				label = ""
			}
			wrap(w, "  ", label+e.Why)
		}
		if e.Document != "" {
			fmt.Fprintf(w, "  see: %s\n", version.Document(e.Document))
		}
	}
}

// wrap writes a text in lines of up to explainWidth. The first line begins with indent. Further lines begin two columns
// to the right of it.
func wrap(w io.Writer, indent, text string) {
	line := indent
	for i, word := range strings.Fields(text) {
		switch {
		case i == 0:
			line += word
		case len(line)+1+len(word) > explainWidth:
			fmt.Fprintln(w, line)
			line = indent + "  " + word
		default:
			line += " " + word
		}
	}
	fmt.Fprintln(w, line)
}
