// Command test lists the tests that a run left out, by reason. It reads the events of
// `go test -json` from its standard input, and ends with 1 if a test was left out.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
)

// An event is a line of `go test -json` (go doc test2json).
type event struct {
	Action, Package, Test, Output string
}

func main() {
	left, err := leftOut(os.Stdin)
	if err != nil {
		fmt.Fprintln(os.Stderr, "test:", err)
		os.Exit(2)
	}
	for _, reason := range slices.Sorted(maps.Keys(left)) {
		fmt.Fprintf(os.Stderr, "*** LEFT OUT: %s (%s)\n", reason, some(left[reason]))
	}
	if len(left) > 0 {
		os.Exit(1)
	}
}

// leftOut returns the names of the skipped tests by the reason that they print.
func leftOut(r io.Reader) (map[string][]string, error) {
	left, said := map[string][]string{}, map[[2]string]string{}
	events := json.NewDecoder(r)
	for {
		var e event
		err := events.Decode(&e)
		if errors.Is(err, io.EOF) {
			return left, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading the events of `go test -json`: %w", err)
		}
		test := [2]string{e.Package, e.Test}
		switch {
		case e.Test == "": // a package without tests is skipped, too
		case e.Action == "output":
			if reason := reasonIn(e.Output); reason != "" {
				said[test] = reason
			}
		case e.Action == "skip":
			left[said[test]] = append(left[said[test]], e.Test)
		}
	}
}

// reasonIn returns what a test printed in a line; empty if the line is printed by package testing.
func reasonIn(output string) string {
	line := strings.TrimSpace(output)
	if line == "" || strings.HasPrefix(line, "=== ") || strings.HasPrefix(line, "--- ") {
		return ""
	}
	if place, text, found := strings.Cut(line, ".go:"); found && !strings.Contains(place, " ") {
		_, text, _ = strings.Cut(text, ": ")
		line = text
	}
	return strings.TrimPrefix(line, "LEFT OUT: ")
}

// some returns the number of tests and the names of the first ones.
func some(tests []string) string {
	const most = 3
	slices.Sort(tests)
	names := strings.Join(tests[:min(most, len(tests))], ", ")
	if len(tests) > most {
		names += ", …"
	}
	return fmt.Sprintf("tests: %d: %s", len(tests), names)
}
