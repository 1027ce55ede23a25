//go:build manual

package main

import (
	"os"

	"github.com/nametap/nametap/internal/manual"
)

// With the tag manual, the program writes its manual pages and shell completion into the
// directory that is its argument, instead of running commands.
func main() { os.Exit(manual.Main(newRootCommand(), os.Args[1:])) }
