package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"nametap-demo": func() { os.Exit(run()) }})
}

// TestScripts runs the real command.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Setup: func(env *testscript.Env) error {
			// The race detector delays the end of every command by a second.
			env.Setenv("GORACE", "atexit_sleep_ms=0")
			return nil
		},
	})
}
