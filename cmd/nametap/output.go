package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clip"
	"github.com/nametap/nametap/internal/settings"
)

// An outputFormat is the value of --output.
type outputFormat string

// The values of outputFormat.
const (
	outputText outputFormat = "text"
	outputJSON outputFormat = "json"
)

// declare declares --output.
func (o *outputFormat) declare(flags *pflag.FlagSet) {
	*o = outputText
	flags.VarP(settings.OneOf(o, outputText, outputJSON), "output", "o", "`format` of the output: text or json")
}

// print prints v as JSON, or as the text that the function write writes. In that text, tabs separate columns.
// Characters that control a terminal become "?", because nameservers, the control plane and users of the host choose
// parts of the text.
func (o outputFormat) print(to io.Writer, v any, write func(w io.Writer)) error {
	var all bytes.Buffer
	if o == outputJSON {
		encoder := json.NewEncoder(&all)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(v); err != nil {
			return err
		}
	} else {
		columns := tabwriter.NewWriter(&all, 0, 0, 2, ' ', 0)
		write(columns)
		_ = columns.Flush() // a buffer does not fail
		text := clip.Lines(all.String())
		all.Reset()
		all.WriteString(text)
	}
	_, err := to.Write(all.Bytes())
	return err
}

// An agentCommand has what every command about the agent on this host needs: a client of the agent, and the format of
// the output.
type agentCommand struct {
	status statusClient
	output outputFormat
}

// declare declares the flags.
func (c *agentCommand) declare(flags *pflag.FlagSet) {
	c.status.declare(flags)
	c.output.declare(flags)
}

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	file, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS) //nolint:gosec // a descriptor
	return err == nil
}

// seconds returns a time that JSON has in seconds, rounded for people.
func seconds(n float64) time.Duration {
	d := time.Duration(n * float64(time.Second))
	switch {
	case d >= time.Second:
		return d.Round(10 * time.Millisecond)
	case d >= time.Millisecond:
		return d.Round(100 * time.Microsecond)
	}
	return d.Round(time.Microsecond)
}

// ago returns a text for a duration, without seconds if they are 0.
func ago(d time.Duration) string {
	text := d.Round(time.Second).String()
	if minutes, ok := strings.CutSuffix(text, "m0s"); ok {
		return minutes + "m"
	}
	return text
}
