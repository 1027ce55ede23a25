//go:build !manual

package main

import "os"

func main() { os.Exit(runProgram(os.Args[1:])) }
