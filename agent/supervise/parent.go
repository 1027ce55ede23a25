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

// parentInterval is how often the supervisor is looked at.
const parentInterval = 5 * clock.Tick

// WatchParent continues the supervisor of this process when it is stopped, until ctx ends. It
// returns at once unless the supervisor is process 1 of a container: elsewhere a user may have
// stopped it from a terminal, and its parent process sees that. A supervisor that is stopped does
// not restart this process.
func WatchParent(ctx context.Context, ticks *clock.Clock, log *slog.Logger) {
	if os.Getppid() != 1 {
		return
	}
	for ticks.Await(ctx, parentInterval, func() bool { return stopped(1) }) {
		log.Error("the supervisor was stopped: continuing it")
		_ = unix.Kill(1, unix.SIGCONT) // it may have continued
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
