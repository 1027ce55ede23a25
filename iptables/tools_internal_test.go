package iptables

import (
	"context"
	"errors"
	"os/exec"
	"runtime"
	"testing"
	"time"
)

// A removal that is retried for 15 s can fail more than 40 times.
func TestBackOff(t *testing.T) {
	t.Parallel()
	for n := range 100 {
		if wait := backOff(n); wait < firstPause/2 || wait > longestPause {
			t.Errorf("after failure %d: %v, want %v to %v", n, wait, firstPause/2, longestPause)
		}
	}
}

// K11: a tool that hangs is killed, although go-iptables would wait for it.
func TestLimited(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := runLimited(ctx, exec.Command("sleep", "600").Run); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want %v", err, context.DeadlineExceeded)
	}
	if err := runLimited(t.Context(), func() error { return nil }); err != nil {
		t.Errorf("in time: %v", err)
	}
	if err := runLimited(ctx, exec.Command("sleep", "600").Run); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("too late: %v, want %v", err, context.DeadlineExceeded)
	}
}

// Programs that the thread runs later are not killed.
func TestLimitedEnds(t *testing.T) {
	t.Parallel()
	for range 200 {
		ctx, cancel := context.WithCancel(t.Context())
		runtime.LockOSThread()
		if err := runLimited(ctx, func() error { cancel(); return nil }); err != nil {
			t.Error(err)
		}
		err := errors.Join(runLimited(ctx, func() error { return nil }), exec.Command("true").Run())
		runtime.UnlockOSThread()
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			t.Fatalf("a later program: %v", err)
		}
	}
}
