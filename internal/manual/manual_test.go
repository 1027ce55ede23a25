package manual_test

import (
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/nametap/nametap/internal/manual"
)

// P12: a page has what roff needs: macros for the parts, and escapes for texts that roff would
// read as macros or print as other letters.
func TestPage(t *testing.T) {
	root := &cobra.Command{Use: "tool", Short: "a tool"}
	run := func(*cobra.Command, []string) {}
	sub := &cobra.Command{Use: "get NAME", Short: "Get it", Long: "Get it.\n\n.hidden\n\n  tool get 'x'", Run: run}
	sub.Flags().String("to-file", `C:\x`, "write to a `file`")
	root.AddCommand(sub, &cobra.Command{Use: "secret", Hidden: true, Run: run})
	const want = `.TH TOOL\-GET 1 "2026-11-22" tool
.SH NAME
tool\-get \- Get it
.SH SYNOPSIS
\fBtool get\fR NAME [flags]
.SH DESCRIPTION
Get it.
.PP
\&.hidden
.PP
.nf
  tool get \(aqx\(aq
.fi
.SH OPTIONS
.SS Flags
.TP
\fB\-h\fR, \fB\-\-help\fR
help for get
.TP
\fB\-\-to\-file\fR \fIfile\fR
write to a file (default C:\ex)
.SH EXIT STATUS
0: done; 1: failed; 2: wrong usage.
.SH SEE ALSO
\fBtool\fR(1)
`
	if got := manual.Page(sub, time.Unix(1795379211, 0).UTC()); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
