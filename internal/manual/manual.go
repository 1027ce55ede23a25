// Package manual writes the manual pages and the shell completion of a command. Only builds
// with the tag manual use it, so its code is in no program that runs.
package manual

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/settings"
)

// Main is the main function of a program whose only argument is a directory such as
// /usr/share. It writes the files of root below the directory, and returns the exit code. The
// date of the pages is SOURCE_DATE_EPOCH, or none.
func Main(root *cobra.Command, args []string) int {
	if err := run(root, args); err != nil {
		fmt.Fprintf(os.Stderr, "writing the manual of %s: %v\n", root.Name(), err)
		return 1
	}
	return 0
}

func run(root *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("want one argument: the directory to write to")
	}
	var date time.Time
	if epoch := os.Getenv("SOURCE_DATE_EPOCH"); epoch != "" {
		seconds, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return fmt.Errorf("SOURCE_DATE_EPOCH=%q: want seconds since 1970", epoch)
		}
		date = time.Unix(seconds, 0).UTC()
	}
	return Write(root, args[0], date)
}

// Write writes the page of every command in section 1, and the completion for bash, zsh and
// fish. The paths in dir are the paths below /usr/share at which man and the shells look for the files.
func Write(root *cobra.Command, dir string, date time.Time) error {
	root.InitDefaultHelpFlag()
	files := map[string]string{}
	for _, command := range Commands(root) {
		files["man/man1/"+PageName(command)+".1"] = Page(command, date)
	}
	for _, shell := range []struct {
		path string
		gen  func(*strings.Builder) error
	}{
		{"bash-completion/completions/" + root.Name(),
			func(b *strings.Builder) error { return root.GenBashCompletionV2(b, true) }},
		{"zsh/site-functions/_" + root.Name(), func(b *strings.Builder) error { return root.GenZshCompletion(b) }},
		{"fish/vendor_completions.d/" + root.Name() + ".fish",
			func(b *strings.Builder) error { return root.GenFishCompletion(b, true) }},
	} {
		var text strings.Builder
		if err := shell.gen(&text); err != nil {
			return err
		}
		files[shell.path] = text.String()
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil { //nolint:gosec // documents
			return err
		}
	}
	return nil
}

// Commands returns a command and all visible commands below it.
func Commands(command *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{command}
	for _, sub := range command.Commands() {
		if sub.IsAvailableCommand() {
			all = append(all, Commands(sub)...)
		}
	}
	return all
}

// PageName returns the name of a command's page, such as nametap-capture-apply.
func PageName(command *cobra.Command) string {
	return strings.ReplaceAll(command.CommandPath(), " ", "-")
}

// Page returns the manual page of a command in the man macros of roff.
func Page(command *cobra.Command, date time.Time) string {
	var page strings.Builder
	day := ""
	if !date.IsZero() {
		day = date.Format(time.DateOnly)
	}
	short := command.Short
	if short == "" {
		short, _, _ = strings.Cut(command.Long, ".")
	}
	fmt.Fprintf(&page, ".TH %s 1 %q %s\n", escape(strings.ToUpper(PageName(command))), day, escape(command.Root().Name()))
	fmt.Fprintf(&page, ".SH NAME\n%s \\- %s\n", escape(PageName(command)),
		escape(strings.Join(strings.Fields(short), " ")))
	fmt.Fprintf(&page, ".SH SYNOPSIS\n\\fB%s\\fR", escape(command.CommandPath()))
	if _, arguments, found := strings.Cut(command.Use, " "); found {
		page.WriteString(" " + escape(arguments))
	}
	page.WriteString(" [flags]\n")
	if command.HasAvailableSubCommands() {
		fmt.Fprintf(&page, ".br\n\\fB%s\\fR \\fIcommand\\fR [flags]\n", escape(command.CommandPath()))
	}
	if command.Long != "" {
		page.WriteString(".SH DESCRIPTION\n")
		writeText(&page, command.Long)
	}
	if command.HasAvailableSubCommands() {
		page.WriteString(".SH COMMANDS\n")
		for _, sub := range command.Commands() {
			if sub.IsAvailableCommand() {
				fmt.Fprintf(&page, ".TP\n\\fB%s\\fR(1)\n%s\n", escape(PageName(sub)), escape(sub.Short))
			}
		}
	}
	if !command.DisableFlagParsing { // else another program defines the flags
		writeFlags(&page, command)
	}
	if command.HasExample() {
		page.WriteString(".SH EXAMPLES\n.nf\n")
		writeLines(&page, command.Example)
		page.WriteString(".fi\n")
	}
	page.WriteString(".SH EXIT STATUS\n0: done; 1: failed; 2: wrong usage.\n")
	if command.HasParent() {
		fmt.Fprintf(&page, ".SH SEE ALSO\n\\fB%s\\fR(1)\n", escape(PageName(command.Parent())))
	}
	return page.String()
}

// writeFlags writes the visible flags of a command below the headings of their groups.
func writeFlags(page *strings.Builder, command *cobra.Command) {
	command.InitDefaultHelpFlag()
	page.WriteString(".SH OPTIONS\n")
	previous := ""
	settings.VisitGroups(command.Flags(), func(title string, flag *pflag.Flag) {
		if title != previous {
			fmt.Fprintf(page, ".SS %s\n", escape(title))
			previous = title
		}
		value, usage := pflag.UnquoteUsage(flag)
		page.WriteString(".TP\n")
		if flag.Shorthand != "" {
			fmt.Fprintf(page, "\\fB\\-%s\\fR, ", escape(flag.Shorthand))
		}
		fmt.Fprintf(page, "\\fB\\-\\-%s\\fR", escape(flag.Name))
		if value != "" && flag.NoOptDefVal == "" {
			fmt.Fprintf(page, " \\fI%s\\fR", escape(value))
		}
		page.WriteString("\n" + escape(usage))
		if flag.DefValue != "" && flag.DefValue != "[]" && flag.Name != "help" {
			page.WriteString(" (default " + escape(flag.DefValue) + ")")
		}
		page.WriteString("\n")
	})
}

// writeText writes paragraphs. Indented paragraphs keep their lines.
func writeText(page *strings.Builder, text string) {
	for i, paragraph := range strings.Split(strings.Trim(text, "\n"), "\n\n") {
		if i > 0 {
			page.WriteString(".PP\n")
		}
		if strings.HasPrefix(paragraph, " ") || strings.HasPrefix(paragraph, "\t") {
			page.WriteString(".nf\n")
			writeLines(page, paragraph)
			page.WriteString(".fi\n")
			continue
		}
		writeLines(page, paragraph)
	}
}

func writeLines(page *strings.Builder, text string) {
	for line := range strings.Lines(text) {
		page.WriteString(escape(strings.TrimSuffix(line, "\n")) + "\n")
	}
}

// escape escapes a text for roff. A dot or a quote at its beginning would start a macro.
func escape(text string) string {
	text = strings.NewReplacer(
		`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`, "\n", " ",
	).Replace(text)
	if strings.HasPrefix(text, ".") {
		text = `\&` + text
	}
	return text
}
