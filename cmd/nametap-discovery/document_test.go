package main

import (
	"io"
	"os"
	"regexp"
	"strings"
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

// The help has the flags below headings, in the order in which they are declared.
func TestHelpIsGrouped(t *testing.T) {
	var help strings.Builder
	if code := execute(t.Context(), []string{"--help"}, &help, io.Discard); code != exitOK {
		t.Fatalf("exit code %d", code)
	}
	var lines []string
	for _, match := range regexp.MustCompile(`(?m)^([A-Z].*):$|^ +--([a-z-]+)`).FindAllStringSubmatch(help.String(), -1) {
		lines = append(lines, match[1]+match[2])
	}
	want := []string{
		"Usage", "Examples", "Commands", "Flags",
		"Objects", "config-dir", "allow-empty", "cluster-domain", "state-dir",
		"Serving, status and logging", "grpc-addr", "max-clients", "http-addr", "log-level",
		"Printing a table", "print-table", "for-namespace", "dns-auto-allocate",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Errorf("headings and flags (-want +got):\n%s", diff)
	}
}
