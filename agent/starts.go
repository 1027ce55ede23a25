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

// steadyTime is how long a process must be ready before its start counts as good.
const steadyTime = time.Second

// forgetStarts deletes two files from the runtime directory of nametap.service: the count of starts and the message of the
// last failure. The script deploy/systemd/back-off reads the count. If there is no count, the script does not pause
// before the next start.
func forgetStarts(log *slog.Logger) {
	for _, name := range []string{"starts", failureName} {
		path := runtimePath(name)
		if path == "" {
			return
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Warn("the next restart of the unit may wait", "error", err)
		}
	}
}

// firstStart reports whether this start is the first since an agent was ready for [steadyTime] or was stopped.
// Without systemd it returns false.
func firstStart() bool {
	path := runtimePath("starts")
	if path == "" {
		return false
	}
	starts, err := os.ReadFile(path)
	return err == nil && strings.TrimSpace(string(starts)) == "1"
}

// failureName is the file with the reason why the last start failed. [NoteFailure] writes the file. If the program is
// missing, the script deploy/systemd/back-off writes it.
const failureName = "failure"

// NoteFailure saves message, the reason why the agent fails; without systemd it does nothing. The next start may
// print the message, because `systemctl status` shows only the log of the current start.
func NoteFailure(message string) {
	if path := runtimePath(failureName); path != "" {
		_ = os.WriteFile(path, []byte(message), 0o600) // the log has the message, too
	}
}

// runtimePath returns the path of the file name in the runtime directory of the unit, "" if systemd does not run
// the agent or the unit has no such directory.
func runtimePath(name string) string {
	if dir := os.Getenv("RUNTIME_DIRECTORY"); dir != "" && os.Getenv("NOTIFY_SOCKET") != "" {
		return filepath.Join(dir, name)
	}
	return ""
}
