// Command results reads the events of `go test -json` from its standard input. It lists the tests that
// the run left out, by reason, and ends with 1 if there are any.
//
// With the argument failed it lists the failed tests instead, as arguments for `go test`: a line for
// each package, with a pattern for its tests. It ends with 1 if nothing failed, or if a busy machine
// cannot explain the failures: more than three tests failed, a package failed without a failed test (it
// does not build) or ended before its last test (it panicked), or the race detector found anything.
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
	if len(os.Args) == 2 && os.Args[1] == "failed" {
		patterns, err := failed(os.Stdin)
		if err != nil {
			fmt.Fprintln(os.Stderr, "test:", err)
			os.Exit(1)
		}
		for _, pkg := range slices.Sorted(maps.Keys(patterns)) {
			fmt.Println(pkg, patterns[pkg])
		}
		return
	}
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
	err := each(r, func(e event) {
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
	})
	return left, err
}

// mostFailed is how many tests may fail in a run for [failed] to list them.
const mostFailed = 3

// failed returns a pattern for the failed tests of each package.
func failed(r io.Reader) (patterns map[string]string, err error) {
	tests, ended, races := map[string][]string{}, map[string]bool{}, map[string]bool{}
	n := 0
	err = each(r, func(e event) {
		switch _, known := tests[e.Package]; {
		case e.Action == "output" && strings.Contains(e.Output, "DATA RACE"):
			races[e.Package] = true
		case e.Action == "output" && e.Test == "" && e.Output == "FAIL\n": // printed after the last test
			ended[e.Package] = true
		case e.Action != "fail" || strings.Contains(e.Test, "/"):
		case e.Test != "":
			tests[e.Package] = append(tests[e.Package], e.Test)
			n++
		case !known:
			tests[e.Package] = nil
		}
	})
	patterns = map[string]string{}
	for pkg, names := range tests {
		switch {
		case len(names) == 0:
			return nil, fmt.Errorf("package %s failed without a failed test", pkg)
		case !ended[pkg]:
			return nil, fmt.Errorf("package %s ended before its last test", pkg)
		case races[pkg]:
			return nil, fmt.Errorf("package %s has a data race", pkg)
		}
		patterns[pkg] = "^(" + strings.Join(names, "|") + ")$"
	}
	switch {
	case err != nil:
		return nil, err
	case n == 0:
		return nil, errors.New("no test failed")
	case n > mostFailed:
		return nil, fmt.Errorf("%d tests failed, want at most %d", n, mostFailed)
	}
	return patterns, nil
}

// each calls visit for each event.
func each(r io.Reader, visit func(event)) error {
	events := json.NewDecoder(r)
	for {
		var e event
		err := events.Decode(&e)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the events of `go test -json`: %w", err)
		}
		visit(e)
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
