package wait_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A wait that fails says what it waited for and on which line of the test, and does so
// before the whole program is ended for its -timeout.
func TestFailureIsReportedBeforeTheProgramEnds(t *testing.T) {
	const variable = "WAIT_TEST_FAILS"
	switch os.Getenv(variable) {
	case "Until":
		wait.Until(t, "pigs fly", func() bool { return false }) // the line that is reported
	case "For":
		wait.For(t, "pigs fly", make(chan int))
	case "":
		t.Parallel()
		for _, function := range []string{"Until", "For"} {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.timeout", "1100ms")
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s", variable, function))
			output, err := cmd.CombinedOutput()
			const want = "timed out waiting: pigs fly"
			if text := string(output); err == nil || !strings.Contains(text, want) || !strings.Contains(text, " wait_test.go:") {
				t.Errorf("%s: %v, want a failure at a line of wait_test.go that says %q:\n%s", function, err, want, text)
			}
		}
	}
}

// In a bubble, both wait in virtual time.
func TestBubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		channel := time.After(40 * time.Second)
		wait.Until(t, "30 s", func() bool { return time.Since(begun) >= 30*time.Second })
		wait.For(t, "10 s more", channel)
		if took := time.Since(begun); took != 40*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}
