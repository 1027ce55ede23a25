// Package manpages checks the manual pages and the shell completion that package manual writes.
package manpages

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nametap/nametap/internal/manual"
)

// Missing lists the visible commands and flags that the pages and the completion of a command
// lack. It calls newRoot several times, and uses each command that newRoot returns only once.
func Missing(newRoot func() *cobra.Command, dir string) ([]string, error) {
	if err := manual.Write(newRoot(), dir, time.Time{}); err != nil {
		return nil, err
	}
	var missing []string
	for _, command := range manual.Commands(newRoot()) {
		path := filepath.Join(dir, "man/man1", manual.PageName(command)+".1")
		page, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		if info.Mode()|0o044 != 0o644 { // the umask may have taken bits away
			missing = append(missing, fmt.Sprintf("%s: mode %v", path, info.Mode()))
		}
		words := strings.Fields(command.CommandPath())[1:]
		flags, err := complete(newRoot(), append(words, "--"))
		if err != nil {
			return nil, err
		}
		subs, err := complete(newRoot(), append(words, ""))
		if err != nil {
			return nil, err
		}
		missing = append(missing, missingFlags(command, string(page), flags)...)
		missing = append(missing, missingCommands(command, string(page), subs)...)
	}
	return missing, nil
}

func missingFlags(command *cobra.Command, page, completed string) []string {
	if command.DisableFlagParsing { // another program defines the flags
		return nil
	}
	var missing []string
	command.InitDefaultHelpFlag()
	command.Flags().VisitAll(func(flag *pflag.Flag) {
		if flag.Hidden {
			return
		}
		if !strings.Contains(page, fmt.Sprintf("\\fB\\-\\-%s\\fR", roff(flag.Name))) {
			missing = append(missing, fmt.Sprintf("page of %s: --%s", command.CommandPath(), flag.Name))
		}
		if !strings.Contains("\n"+completed, "\n--"+flag.Name+"\t") {
			missing = append(missing, fmt.Sprintf("completion of %s: --%s", command.CommandPath(), flag.Name))
		}
	})
	return missing
}

func missingCommands(command *cobra.Command, page, completed string) []string {
	var missing []string
	for _, sub := range command.Commands() {
		if !sub.IsAvailableCommand() {
			continue
		}
		if !strings.Contains(page, roff(manual.PageName(sub))+`\fR(1)`) {
			missing = append(missing, fmt.Sprintf("page of %s: %s", command.CommandPath(), sub.Name()))
		}
		if !strings.Contains("\n"+completed, "\n"+sub.Name()+"\t") {
			missing = append(missing, fmt.Sprintf("completion of %s: %s", command.CommandPath(), sub.Name()))
		}
	}
	return missing
}

// complete returns the completions of arguments. It requests them in the same way as the completion scripts of the
// shells.
func complete(root *cobra.Command, args []string) (string, error) {
	var out strings.Builder
	root.SetOut(&out)
	root.SetErr(io.Discard)
	root.SetArgs(append([]string{cobra.ShellCompRequestCmd}, args...))
	err := root.Execute()
	return out.String(), err
}

// roff returns a name as a page has it.
func roff(name string) string { return strings.ReplaceAll(name, "-", `\-`) }
