package wait_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nametap/nametap/internal/testkit/wait"
)

// A failure is a TB that notes why it fails.
type failure struct{ why string }

// Fatalf notes the reason.
func (f *failure) Fatalf(format string, args ...any) { f.why = fmt.Sprintf(format, args...) }

// Both wait for what happens, here in virtual time.
func TestWaits(t *testing.T) {
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

// What does not happen fails the test, with what was waited for.
func TestFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var until, receive failure
		wait.Until(&until, "pigs fly", func() bool { return false })
		wait.For(&receive, "pigs fly", make(chan int))
		for _, f := range []failure{until, receive} {
			if f.why != "timed out waiting: pigs fly" {
				t.Errorf("the test fails with %q", f.why)
			}
		}
	})
}
