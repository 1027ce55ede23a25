package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/nametap/nametap/iptables"
)

// notifySystemd notifies systemd, if systemd started the agent, that it is ready: the
// listeners are open, and capture is as its switch says. It does
// not wait for a table, because units that need DNS wait for this notification at boot.
//
// Then it notifies the watchdog as long as any UDP listener answers. A restart would not help
// in other cases, so the watchdog is notified in them, too: one of two families is switched
// off on this host, the TCP listeners have reached their limit of clients, or no listener can
// be probed because the host cannot send packets.
func notifySystemd(ctx context.Context, c *core) error {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("reading the interval of systemd's watchdog: %w", err)
	}
	select {
	case <-c.proxy.Ready():
	case <-ctx.Done():
		return nil
	}
	if c.capture != nil {
		c.capture.awaitBegun(ctx)
	}
	if ctx.Err() != nil {
		return nil
	}
	if err := notify(ctx, daemon.SdNotifyReady); err != nil {
		return fmt.Errorf("notifying systemd that the agent is ready: %w", err)
	}
	steady := time.NewTimer(SteadyTime)
	defer steady.Stop()
	var tick <-chan time.Time
	if interval > 0 {
		const attempts = 3 // before the watchdog restarts the agent
		ticker := time.NewTicker(interval / attempts)
		defer ticker.Stop()
		tick = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-steady.C:
			forgetStarts(c.log)
			continue
		case <-tick:
		}
		if err := anyAnswers(ctx, udpListeners(c.proxy)); err != nil {
			c.log.Warn("no DNS listener answers: systemd's watchdog is not notified", "error", err)
			continue
		}
		if err := notify(ctx, daemon.SdNotifyWatchdog); err != nil {
			c.log.Warn("notifying systemd's watchdog failed", "error", err)
		}
	}
}

// awaitBegun returns when capture is as its switch says, or when ctx ends. If the rules are installed and
// nothing reaches the agent through them, it waits no longer than the lease.
func (c *capture) awaitBegun(ctx context.Context) {
	select {
	case <-c.kernel.Begun():
	case <-ctx.Done():
	}
	if !c.current().On {
		return
	}
	limit := time.NewTimer(iptables.LeaseTime)
	defer limit.Stop()
	select {
	case <-c.ways.alive:
	case <-limit.C:
	case <-ctx.Done():
	}
}

// SteadyTime is how long a process is ready before it counts as one that has started well.
const SteadyTime = time.Second

// forgetStarts calls ForgetStarts for nametap.service.
func forgetStarts(log *slog.Logger) {
	if dir := runtimePath(""); dir != "" {
		ForgetStarts(dir, log)
	}
}

// ForgetStarts deletes the files, in the runtime directory of a unit, in which the unit notes the
// starts in a row that failed, so that the next start does not wait.
func ForgetStarts(dir string, log *slog.Logger) {
	for _, name := range []string{"starts", failureName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			log.Warn("the next restart of the unit may wait", "error", err)
		}
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

// notify sends a state to systemd. It returns when ctx ends, even if systemd does not read
// the state.
func notify(ctx context.Context, state string) error {
	sent := make(chan error, 1)
	go func() {
		_, err := daemon.SdNotify(false, state)
		sent <- err
	}()
	select {
	case err := <-sent:
		return err
	case <-ctx.Done():
		return nil
	}
}
