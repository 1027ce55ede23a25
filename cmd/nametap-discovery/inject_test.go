package main

import (
	"io"
	"os"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// R7: docs/injection.md has every flag with its default, and no other.
func TestInjectFlagsDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/injection.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `--([a-z-]+)`(?:, `-[a-z]`)? \\| (?:`([^`]*)`)? ?\\|")
	for _, match := range row.FindAllStringSubmatch(string(text), -1) {
		documented[match[1]] = match[2]
	}
	declared := map[string]string{}
	newInject(io.Discard, io.Discard).Flags().VisitAll(func(flag *pflag.Flag) { declared[flag.Name] = flag.DefValue })
	if diff := cmp.Diff(declared, documented); diff != "" {
		t.Errorf("docs/injection.md (-flags +document):\n%s", diff)
	}
	served := newRoot(io.Discard, io.Discard).Flags()
	for _, match := range regexp.MustCompile("(?:^|[\\s`(])--([a-z-]+[a-z])").FindAllStringSubmatch(string(text), -1) {
		if _, ok := declared[match[1]]; !ok && served.Lookup(match[1]) == nil {
			t.Errorf("docs/injection.md: there is no flag --%s of this command or of the webhook", match[1])
		}
	}
}
