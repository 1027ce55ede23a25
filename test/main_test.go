package test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
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
	// The tests mostly wait for timers of nametap, so more of them run at a time than there
	// are processors. The flag on the command line comes first.
	if err := flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0))); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binary = filepath.Join(dir, "nametap")
	return m.Run()
}
