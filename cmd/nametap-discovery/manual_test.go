package main

import (
	"io"
	"testing"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/testkit/manpages"
)

// P12: the manual pages and the completion of the shells have every command and every flag.
func TestManual(t *testing.T) {
	missing, err := manpages.Missing(func() *cobra.Command { return newRoot(io.Discard, io.Discard) }, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, what := range missing {
		t.Error("missing: ", what)
	}
}
