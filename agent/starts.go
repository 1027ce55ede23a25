package agent

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// SteadyTime is how long a process is ready before it counts as one that has started well.
const SteadyTime = time.Second

// ForgetStarts deletes the files, in the runtime directory of a unit, in which the unit notes the
// starts in a row that failed, so that the next start does not wait.
func ForgetStarts(dir string, log *slog.Logger) {
	for _, name := range []string{"starts", failureName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Warn("the next restart of the unit may wait", "error", err)
		}
	}
}

// forgetStarts calls ForgetStarts for nametap.service.
func forgetStarts(log *slog.Logger) {
	if dir := runtimePath(""); dir != "" {
		ForgetStarts(dir, log)
	}
}

// firstStart reports whether systemd runs the agent, and no start has failed since an agent was ready for
// [SteadyTime].
func firstStart() bool {
	path := runtimePath("starts")
	if path == "" {
		return false
	}
	starts, err := os.ReadFile(path)
	return err == nil && strings.TrimSpace(string(starts)) == "1"
}

// failureName is the file in which the unit notes why the last start has failed.
const failureName = "failure"

// NoteFailure notes the message of an agent that fails, if systemd runs it. The next start shows
// it, because `systemctl status` shows only the log of the current start.
func NoteFailure(message string) {
	if path := runtimePath(failureName); path != "" {
		_ = os.WriteFile(path, []byte(message), 0o600) // the log has the message, too
	}
}

// runtimePath returns the path of a file in the runtime directory of the unit, "" without one.
func runtimePath(name string) string {
	if dir := os.Getenv("RUNTIME_DIRECTORY"); dir != "" && os.Getenv("NOTIFY_SOCKET") != "" {
		return filepath.Join(dir, name)
	}
	return ""
}
