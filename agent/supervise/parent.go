package supervise

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// WatchParent continues the supervisor of this process when it is stopped, until ctx ends. It
// returns at once unless the supervisor is process 1 of a container: elsewhere a user may have
// stopped it from a terminal, and its parent process sees that. A supervisor that is stopped does
// not restart this process.
func WatchParent(ctx context.Context, log *slog.Logger) {
	if os.Getppid() != 1 {
		return
	}
	ticker := time.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		if stopped(1) {
			log.Error("the supervisor was stopped: continuing it")
			_ = unix.Kill(1, unix.SIGCONT) // it may have continued
		}
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
