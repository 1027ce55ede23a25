package main

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/version"
)

// packedDocuments has the rows, problems, symptoms and error codes of the documents of this version. `make generate` writes it.
//
//go:embed explain.gz
var packedDocuments []byte

// An explained is what the documents say about one thing. The title of a row or of a code has the ID.
type explained struct {
	ID       string `json:"id,omitempty"` // of a row, a problem or an error code
	Title    string `json:"title"`
	Text     string `json:"text"`
	Document string `json:"document"`
}

func newExplainCommand() *cobra.Command {
	var output outputFormat
	command := &cobra.Command{
		Use:   "explain ROW|CODE|WORD...",
		Short: "Explain a row, a problem or an error code that nametap prints",
		Long: `Print what the documents of this version say about a row of docs/behaviour.md such as N9,
a problem such as nameserver_down, an Extended DNS Error such as 22, or about all of the
words. This needs no network and no agent.

The exit code is 1 if the documents say nothing about it.`,
		Example: `  nametap explain N9
  nametap explain nameserver_down
  nametap explain 22
  nametap explain no nameserver to ask`,
		Args: usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(command *cobra.Command, args []string) error {
			found, err := findExplained(args)
			if err != nil {
				return err
			}
			return output.print(command.OutOrStdout(), found, func(w io.Writer) {
				for _, e := range found {
					fmt.Fprintf(w, "%s: %s\n  see: %s\n", e.Title, e.Text, version.Document(e.Document))
				}
			})
		},
	}
	output.declare(command.Flags())
	return command
}

// findExplained returns what the documents say about the rows and codes that words are or, if one of them is neither, what
// has the words as they are, or else all of them.
func findExplained(words []string) (found []explained, err error) {
	var all []explained
	unpacked, err := gzip.NewReader(bytes.NewReader(packedDocuments))
	if err == nil {
		err = json.NewDecoder(unpacked).Decode(&all)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the documents in this program: %w", err)
	}
	words = strings.FieldsFunc(strings.ToLower(strings.Join(words, " ")), func(r rune) bool { return strings.ContainsRune(" ,()[]", r) })
	for _, word := range words {
		i := slices.IndexFunc(all, func(e explained) bool { return strings.ToLower(e.ID) == word })
		if i < 0 {
			found = nil
			break
		}
		found = append(found, all[i])
	}
	isCode := len(words) == 1 && strings.ContainsAny(words[0], "0123456789")
	for _, sought := range [][]string{{strings.Join(words, " ")}, words} { // a message comes first
		if len(found) == 0 && !isCode {
			found = slices.DeleteFunc(slices.Clone(all), func(e explained) bool {
				text := strings.ToLower(e.Title + " " + e.Text)
				return slices.ContainsFunc(sought, func(part string) bool { return !strings.Contains(text, part) })
			})
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("the documents of version %s say nothing about %q: want a row such as N9, a code such as 22 or nameserver_down, "+
			"or words", version.String(), strings.Join(words, " "))
	}
	return found, nil
}
