// Package manual writes the manual pages and the shell completion of a command. Only builds
// with the tag manual use it, so its code is in no program that runs.
package manual

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Main is the main function of a program whose only argument is a directory such as
// /usr/share. It writes the files of root below the directory, and returns the exit code. The
// date of the pages is SOURCE_DATE_EPOCH, or today.
func Main(root *cobra.Command, args []string) int {
	err := errors.New("want one argument: the directory to write to")
	if len(args) == 1 {
		err = Write(root, args[0])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "writing the manual of %s: %v\n", root.Name(), err)
		return 1
	}
	return 0
}

// Write writes the page of every command in section 1, and the completion for bash, zsh and
// fish. The paths in dir are the paths below /usr/share at which man and the shells look for the files.
func Write(root *cobra.Command, dir string) error {
	root.DisableAutoGenTag = true
	sub := func(path string) string { return filepath.Join(dir, path) }
	for _, path := range []string{"man/man1", "bash-completion/completions", "zsh/site-functions", "fish/vendor_completions.d"} {
		if err := os.MkdirAll(sub(path), 0o755); err != nil {
			return err
		}
	}
	return errors.Join(
		doc.GenManTreeFromOpts(root, doc.GenManTreeOptions{
			Path: sub("man/man1"), CommandSeparator: "-", Header: &doc.GenManHeader{Section: "1", Source: root.Name(), Manual: root.Name()},
		}),
		root.GenBashCompletionFileV2(sub("bash-completion/completions/"+root.Name()), true),
		root.GenZshCompletionFile(sub("zsh/site-functions/_"+root.Name())),
		root.GenFishCompletionFile(sub("fish/vendor_completions.d/"+root.Name()+".fish"), true),
	)
}
