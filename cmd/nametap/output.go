package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/pflag"
)

// Values of --output.
const (
	outputText = "text"
	outputJSON = "json"
)

// declareOutput declares --output for a command that prints something.
func declareOutput(flags *pflag.FlagSet, output *string) {
	flags.StringVarP(output, "output", "o", outputText, "text or json")
}

// printOutput prints v as JSON, or by text, as --output says.
func printOutput(w io.Writer, output string, v any, text func(w io.Writer) error) error {
	switch output {
	case outputText:
		return text(w)
	case outputJSON:
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(v)
	}
	return usageError{fmt.Errorf("--output=%q: want %s or %s", output, outputText, outputJSON)}
}
