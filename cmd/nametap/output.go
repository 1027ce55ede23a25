package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
)

// Values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

// An outputFormat is the value of --output. An unknown format is refused before the command
// does anything.
type outputFormat string

// String returns the format.
func (o *outputFormat) String() string { return string(*o) }

// Set reads a format.
func (o *outputFormat) Set(s string) error {
	if s != outputText && s != outputJSON {
		return fmt.Errorf("want %s or %s", outputText, outputJSON)
	}
	*o = outputFormat(s)
	return nil
}

// Type names the kind of value in the help.
func (o *outputFormat) Type() string { return "string" }

// declareOutput declares --output.
func declareOutput(flags *pflag.FlagSet, output *string) {
	*output = outputText
	flags.VarP((*outputFormat)(output), "output", "o", "`format` of the output: text or json")
}

// printOutput prints v as JSON, or calls text to print it, as --output says.
func printOutput(w io.Writer, output string, v any, text func(w io.Writer) error) error {
	if output != outputJSON {
		return text(w)
	}
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(v)
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
