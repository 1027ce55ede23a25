// Package wait lets a test wait for an event instead of sleeping:
//
//	wait.Until(t, "the nameserver is down", func() bool { return state() == upstream.Down })
//	err := wait.For(t, "Run returns", returned)
//
// Both fail the test after [Limit], and say what they waited for. In a bubble of testing/synctest, Limit
// is virtual time, and the condition is called at most once in each millisecond of it.
package wait

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// Limit is how long a test waits for what must happen: the sum of the pauses between two looks, not a time of the
// clock. A moment in which the machine stands still counts as one pause. Only a test that fails waits that
// long, so it is generous.
const Limit = 2 * time.Minute

// longestPause is the longest time between two looks.
const longestPause = 50 * time.Millisecond

// parallelTests is how many parallel tests run at a time.
const parallelTests = 8

// Main is the TestMain of a package. Several parallel tests run at a time, on any number of processors, because tests
// wait most of the time; `go test -parallel` takes precedence. Main fails if goroutines are left when the tests have ended.
func Main(m *testing.M) {
	Prepare()
	code := m.Run()
	if err := leaks(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// forGo matches what Go and tests need of the environment. Sockets are below TMPDIR: their paths have at most 107 bytes.
var forGo = regexp.MustCompile(`^((GO.*|PATH|HOME|XDG_CACHE_HOME|CI)=|TMPDIR=.{0,32}$)`)

// Prepare sets how many parallel tests of a package run at a time: Go's default is the number of processors. The tests get no
// settings from outside: Prepare clears the environment, except in the commands that tests run.
func Prepare() {
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); strings.HasSuffix(os.Args[0], ".test") && !forGo.MatchString(variable) {
			os.Unsetenv(name)
		}
	}
	if err := flag.Set("test.parallel", strconv.Itoa(parallelTests)); err != nil {
		panic(err) // not in a test
	}
}

// leaks returns the goroutines that are left. Goroutines that are about to end need a processor for it, so it looks many
// times: goleak takes a second for each.
func leaks() (err error) {
	for range int(Limit / time.Second) {
		if err = goleak.Find(); err == nil {
			return nil
		}
	}
	return err
}

// A TB is the part of [testing.TB] that this package needs. A testscript.TestScript is
// a TB, too.
type TB interface {
	Fatalf(format string, args ...any)
}

// Until calls condition on the calling goroutine until it returns true. event says what the test waits for. Where
// there is a channel to receive from, use [For].
func Until(tb TB, event string, condition func() bool) {
	helper(tb)()
	end := programEnd(tb)
	var waited time.Duration
	for {
		begun := time.Now()
		if condition() {
			return
		}
		if waited >= Limit || begun.After(end) {
			tb.Fatalf("timed out waiting: %s", event)
			return
		}
		// A condition that takes long, such as one that runs a command, leaves half
		// of the processor to the work it waits for.
		pause := min(max(time.Since(begun), time.Millisecond), longestPause)
		time.Sleep(pause)
		waited += pause
	}
}

// For receives from channel. event says what the test waits for. For returns the zero value if the channel is closed.
func For[T any](tb TB, event string, channel <-chan T) T {
	helper(tb)()
	end := programEnd(tb)
	ticks := time.NewTicker(longestPause)
	defer ticks.Stop()
	for waited := time.Duration(0); waited < Limit && time.Now().Before(end); waited += longestPause {
		select {
		case value := <-channel:
			return value
		case <-ticks.C:
		}
	}
	tb.Fatalf("timed out waiting: %s", event)
	var zero T
	return zero
}

// programEnd returns a time shortly before `go test -timeout` ends the whole program without saying what was waited
// for. Without such an end it is far away.
func programEnd(tb TB) (end time.Time) {
	end = time.Now().Add(1000 * Limit)
	// In a bubble, which has a time of its own, a test has no deadline: asking for it panics.
	defer func() { _ = recover() }()
	if t, ok := tb.(*testing.T); ok {
		if deadline, ok := t.Deadline(); ok {
			return deadline.Add(-time.Second)
		}
	}
	return end
}

// helper returns tb.Helper, which does nothing if tb has none.
func helper(tb TB) func() {
	if tb, ok := tb.(interface{ Helper() }); ok {
		return tb.Helper
	}
	return func() {}
}
