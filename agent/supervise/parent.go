package supervise

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"

	"golang.org/x/sys/unix"

	"github.com/nametap/nametap/internal/clock"
)

// WatchParent sends SIGCONT to the supervisor of this process each time that a signal has stopped the supervisor, until
// ctx ends. A stopped supervisor would not restart this process. If the supervisor is not process 1 of a container,
// WatchParent returns at once: the stop may be intended (Ctrl-Z in a terminal), and the parent of the supervisor, such
// as a shell, can continue it.
func WatchParent(ctx context.Context, pollClock *clock.Clock, log *slog.Logger) {
	if os.Getppid() != 1 {
		return
	}
	for pollClock.Await(ctx, 5*clock.Tick, func() bool { return stopped(1) }) {
		log.Error("the supervisor was stopped: continuing it")
		_ = unix.Kill(1, unix.SIGCONT) // has no effect if it runs again
	}
}

// stopped reports whether a process was stopped by a signal.
func stopped(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" ")) // proc(5)
	return bytes.HasPrefix(state, []byte("T"))
}
