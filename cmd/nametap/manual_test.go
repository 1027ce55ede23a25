package main

import (
	"testing"

	"github.com/nametap/nametap/internal/testkit/manpages"
)

// P12: the manual pages and the completion of the shells have every command and every flag.
func TestManual(t *testing.T) {
	missing, err := manpages.Missing(newRootCommand, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range missing {
		t.Error("missing: ", what)
	}
}
