package main

import (
	"io"
	"os"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// R7: docs/discovery.md has every flag with its default, and no other.
func TestFlagsDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/discovery.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| (?:`([^`]*)`)? ?\\|")
	for _, match := range row.FindAllStringSubmatch(string(text), -1) {
		documented[match[1]] = match[2]
	}
	declared := map[string]string{}
	newRoot(io.Discard, io.Discard).Flags().VisitAll(func(flag *pflag.Flag) {
		if flag.Name != "help" {
			declared[flag.Name] = flag.DefValue
		}
	})
	if diff := cmp.Diff(declared, documented); diff != "" {
		t.Errorf("docs/discovery.md (-flags +document):\n%s", diff)
	}
}
