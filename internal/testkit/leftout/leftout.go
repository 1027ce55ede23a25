// Package leftout leaves out tests that this machine cannot run.
package leftout

import (
	"os"
	"testing"
)

// Test leaves a test out and says which, and what it needs. With CI=true the test fails instead, so that no run in CI passes
// without it.
func Test(tb testing.TB, format string, args ...any) {
	tb.Helper()
	if os.Getenv("CI") == "true" {
		tb.Fatalf("left out, and in CI every test must run: "+format, args...)
	}
	tb.Skipf("LEFT OUT: "+format, args...)
}
