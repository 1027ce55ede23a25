package test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// binary is the path of the nametap binary that TestMain builds.
var binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if os.Getenv(confinedEnv) != "" {
		return runConfined(os.Args[1:])
	}
	dir, err := process.Build("nametap")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	wait.Together()
	binary = filepath.Join(dir, "nametap")
	return m.Run()
}
