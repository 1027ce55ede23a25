package main

import (
	"encoding/json"
	"io"
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// Every flag that a document about nametap-discovery names is a flag of one of its commands.
func TestFlagsInDocuments(t *testing.T) {
	known := map[string]bool{}
	for _, command := range append(newRoot(io.Discard, io.Discard).Commands(), newRoot(io.Discard, io.Discard)) {
		command.Flags().VisitAll(func(flag *pflag.Flag) { known[flag.Name] = true })
	}
	others := []string{"egress", "help", "from-file", "patch-file", "context", "name", "server-side", "overwrite"} // the agent's, kubectl's, istioctl's
	for _, document := range []string{"discovery.md", "discovery-reference.md", "injection.md"} {
		text, err := os.ReadFile("../../docs/" + document)
		if err != nil {
			t.Fatal(err)
		}
		named := regexp.MustCompile("(?:^|[\\s`(])--([a-z-]+[a-z])").FindAllStringSubmatch(string(text), -1)
		if len(named) == 0 {
			t.Errorf("docs/%s names no flag", document)
		}
		for _, match := range named {
			if !known[match[1]] && !slices.Contains(others, match[1]) {
				t.Errorf("docs/%s: there is no flag --%s", document, match[1])
			}
		}
	}
}

// P9: the schema of the chart allows the flags that the chart does not set itself, except flags for
// printing a table.
func TestChartSettings(t *testing.T) {
	own := []string{
		"help", "tls-addr", "grpc-addr", "http-addr", "inject-addr", "inject-config",
		"for-namespace", "for-labels", "dns-auto-allocate",
	}
	var others []string
	newRoot(io.Discard, io.Discard).Flags().VisitAll(func(flag *pflag.Flag) {
		if !slices.Contains(own, flag.Name) {
			others = append(others, flag.Name)
		}
	})
	text, err := os.ReadFile("../../deploy/chart/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var schema struct {
		Properties struct {
			Discovery struct {
				Properties struct {
					Settings struct{ PropertyNames struct{ Enum []string } }
				}
			}
		}
	}
	if err := json.Unmarshal(text, &schema); err != nil {
		t.Fatal(err)
	}
	slices.Sort(others)
	if diff := cmp.Diff(others, schema.Properties.Discovery.Properties.Settings.PropertyNames.Enum); diff != "" {
		t.Errorf("flags (-) and settings of values.schema.json (+):\n%s", diff)
	}
}
