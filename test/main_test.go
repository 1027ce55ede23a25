package test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/nametap/nametap/internal/testkit/process"
	"github.com/nametap/nametap/internal/testkit/wait"
)

// binaries has nametap.
var binaries = process.Of("nametap")

// planes has nametap-discovery.
var planes = process.Of("nametap-discovery")

// binary returns the path of nametap.
func binary(tb testing.TB) string {
	tb.Helper()
	return filepath.Join(binaries.Dir(tb), "nametap")
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	defer binaries.Remove()
	defer planes.Remove()
	wait.Prepare()
	return m.Run()
}
